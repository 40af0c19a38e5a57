"""`python -m sim run`: trains a scenario and its reference and prints how they compare."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.config import Scenario, load_scenario
from real.flags import add_scenario_flags, scenario_overrides
from real.reference import Reference, check_reference
from real.result import as_json, format_table
from sim.checks.verdict import UnknownRule, required_rules
from sim.commands.common import (
    DEFAULT_SCENARIO,
    DIFFERS,
    Progress,
    add_fault_flag,
    add_require_flag,
    fail,
    faults_of,
    no_progress,
    progress_line,
)
from sim.commands.traceback import frames_of
from sim.faults import needs_kernels
from sim.hosting import add_hosting_flags, refuse_unfit, subject_of
from sim.session.subject import MFSDP2

if TYPE_CHECKING:
    from sim.world import WorldError


def add(commands: Any) -> None:
    """Adds the command's parser."""
    run = commands.add_parser(
        "run",
        help="run a scenario on fake ranks and compare it with its reference",
        description="Runs a scenario on fake ranks, compares it with the same model without FSDP, "
        "and writes a trace. Exit status: 0 all agrees, 1 it does not, 2 bad input.",
    )
    run.add_argument("scenario", nargs="?", type=Path, default=DEFAULT_SCENARIO, help="a TOML file")
    add_scenario_flags(run)
    run.add_argument("--schedule-seed", type=int, default=0, help="order in which ranks take turns")
    run.add_argument(
        "--reference",
        type=Reference,
        choices=list(Reference),
        default=Reference.DDP,
        help="compare with Megatron's distributed data parallel under its plain schedule (ddp, "
        "default), with its distributed optimizer under the scenario's schedule (distopt), or with "
        "the same target under its plain schedule (plain)",
    )
    add_hosting_flags(run)
    run.add_argument("--world", choices=("inprocess", "gloo"), default="inprocess")
    run.add_argument("--out", type=Path, help="folder of the trace (default: runs/SCENARIO)")
    run.add_argument(
        "--kernels",
        choices=("none", "step", "all", "build"),
        default="step",
        help="record kernels with the storages they read and write, and check their order: in the "
        "second step (default; the first if there is only one), in all steps, in all steps and "
        "while the model is built, or not at all",
    )
    run.add_argument(
        "--shapes", action="store_true", help="record the shapes of kernels too, for timing"
    )
    run.add_argument(
        "--shapes-only",
        action="store_true",
        help="run forward and backward without arithmetic, at any size, and write the trace with "
        "kernels and their shapes; compares nothing",
    )
    run.add_argument(
        "--routing-imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="with --shapes-only: tokens of the most loaded expert over the mean (default: 1)",
    )
    run.add_argument(
        "--no-fsdp",
        action="store_true",
        help="with --shapes-only: the model without FSDP, under the scenario's schedule",
    )
    add_fault_flag(run)
    add_require_flag(run)
    run.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Trains the scenario and its reference."""
    scenario = load_scenario(arguments.scenario).changed(**scenario_overrides(arguments))
    faults = faults_of(arguments, scenario)
    if faults and (arguments.world == "gloo" or arguments.shapes_only):
        got = "--shapes-only" if arguments.shapes_only else "--world gloo"
        return fail(f"Expected --fault with --world inprocess and arithmetic, got {got}.")
    if not arguments.shapes_only and (arguments.no_fsdp or arguments.routing_imbalance != 1.0):
        return fail("Expected --no-fsdp and --routing-imbalance with --shapes-only, got none.")
    if not 1.0 <= arguments.routing_imbalance < 2.0:
        got = arguments.routing_imbalance
        return fail(f"Expected a --routing-imbalance of at least 1 and below 2, got {got}.")
    if arguments.require is not None and (arguments.world == "gloo" or arguments.shapes_only):
        got = "--shapes-only" if arguments.shapes_only else "--world gloo"
        return fail(f"Expected --require with a run whose trace is judged, got {got}.")
    if arguments.reference is not Reference.DDP:
        if arguments.world == "gloo" or arguments.shapes_only:
            return fail("Expected --reference ddp with --world gloo and --shapes-only.")
        check_reference(scenario, arguments.reference)
    subject = subject_of(arguments)
    if subject is not MFSDP2 and (arguments.world == "gloo" or arguments.shapes_only):
        return fail("Expected --target mfsdp2 of the release with --world gloo and --shapes-only.")
    out = arguments.out or Path("runs") / arguments.scenario.stem
    replay = f"python -m sim {shlex.join(argv)}"
    try:
        require = required_rules(arguments.require)
    except UnknownRule as error:
        return fail(str(error))
    # Imported late: bad input is answered before torch and Megatron load.
    from sim.quiet import quiet

    quiet()
    refusal = refuse_unfit(subject)
    if refusal is not None:
        return fail(refusal)
    from sim.session.options import BUILD, RunOptions
    from sim.session.run import run_in_process
    from sim.session.sinks import open_sinks
    from sim.world import WorldError

    needs_all = any(map(needs_kernels, faults))  # who knows in which step it comes up
    kernel_steps: dict[str, list[int] | None] = {
        "none": [],
        "step": [min(1, scenario.train_iters - 1)],
        "all": None,
        "build": [BUILD, *range(scenario.train_iters)],
    }
    progress = progress_line() if not arguments.json else no_progress
    if arguments.shapes_only:
        return _run_for_shapes(scenario, arguments, out, replay, progress)
    try:
        if arguments.world == "gloo":
            from sim.session.gloo import run_gloo

            result = run_gloo(scenario, RunOptions(replay=replay), out=out, progress=progress)
        else:
            result = run_in_process(
                scenario,
                RunOptions(
                    subject=subject,
                    reference=arguments.reference,
                    schedule_seed=arguments.schedule_seed,
                    faults=faults,
                    kernel_steps=None if needs_all else kernel_steps[arguments.kernels],
                    records_shapes=arguments.shapes,
                    require=require,
                    replay=replay,
                ),
                sinks=open_sinks(out, scenario.world_size),
                out=out,
                progress=progress,
            )
    except WorldError as error:
        progress("")
        return _say_failed(error, is_json=arguments.json)
    progress("")
    problems = result.problems()
    if arguments.json:
        print(json.dumps(as_json(result)))
    else:
        print(format_table(scenario, result))
    return DIFFERS if problems else 0


def _say_failed(error: WorldError, *, is_json: bool) -> int:
    """Says how a run failed, where in whose code, and what the checks find in it up to there."""
    frames = frames_of(error.__cause__)
    if is_json:
        failure = {
            "passed": False,
            "error": error.problem,
            "kind": error.kind.value,
            "rank": error.rank,
            "standing": error.standing,
            "traceback": frames,
            "violations": [violation.as_dict() for violation in error.findings],
        }
        print(json.dumps(failure))
    print(f"sim: {error}", file=sys.stderr)
    for frame in frames:
        print(f"  raised in {frame}", file=sys.stderr)
    for violation in [] if is_json else error.findings:
        print(violation)
    return DIFFERS


def _run_for_shapes(
    scenario: Scenario, arguments: argparse.Namespace, out: Path, replay: str, progress: Progress
) -> int:
    from sim.hollow.routing import Routing
    from sim.session.shapes import ShapesRun, run_for_shapes
    from sim.session.sinks import open_sinks
    from sim.world import WorldError

    options = ShapesRun(
        is_reference=arguments.no_fsdp,
        routing=Routing(imbalance=arguments.routing_imbalance, seed=scenario.seed),
        replay=replay,
    )
    sinks = open_sinks(out, scenario.world_size)
    try:
        result = run_for_shapes(scenario, options, sinks=sinks, out=out, progress=progress)
    except WorldError as error:
        progress("")
        print(f"sim: {error}", file=sys.stderr)
        return DIFFERS
    progress("")
    if arguments.json:
        numbers = {"records": result.num_records, "wall_s": round(result.wall_s, 2)}
        print(json.dumps({"kind": "shapes only", "trace": str(out), **numbers}))
    else:
        print(
            f"shapes only: no values, so no losses and nothing compared\ntrace: {out} "
            f"({result.num_records} records)\n{result.wall_s:.1f} s, imports excluded"
        )
    return 0
