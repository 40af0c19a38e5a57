"""The commands of the bench: `python -m sim run`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from real.config import ScenarioError, load_scenario
from real.flags import BAD_INPUT, OneLineParser, add_scenario_flags, scenario_overrides
from real.result import as_json, format_table
from real.trace import TraceError, read_traces

if TYPE_CHECKING:
    from sim.runner import Progress

DEFAULT_SCENARIO: Final = Path(__file__).parent.parent / "fixtures" / "configs" / "default.toml"
DIFFERS: Final = 1
INTERRUPTED: Final = 130


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = OneLineParser(
        prog="python -m sim", description="MFSDP v2 under combined 1F1B without a GPU."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    run = commands.add_parser(
        "run",
        help="run a scenario on fake ranks and compare it with its reference",
        description="Runs a scenario on fake ranks, compares it with the same model without FSDP, "
        "and writes a trace. Exit status: 0 all agrees, 1 it does not, 2 bad input.",
    )
    run.add_argument("scenario", nargs="?", type=Path, default=DEFAULT_SCENARIO, help="a TOML file")
    add_scenario_flags(run)
    run.add_argument("--schedule-seed", type=int, default=0, help="order in which ranks take turns")
    run.add_argument("--world", choices=("inprocess", "gloo"), default="inprocess")
    run.add_argument("--out", type=Path, help="folder of the trace (default: runs/SCENARIO)")
    run.add_argument(
        "--kernels",
        action="store_true",
        help="also record kernels with the storages they read and write, and check their order",
    )
    run.add_argument("--json", action="store_true", help="print one JSON object")
    check = commands.add_parser(
        "check",
        help="judge a trace",
        description="Judges the traces of one run, simulated or real. Exit status: 0 nothing "
        "broken, 1 violations, 2 no readable trace.",
    )
    check.add_argument("trace", type=Path, help="folder with one file a rank")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    mutants = commands.add_parser(
        "mutants",
        help="take one duty of the hooks away at a time and see what notices",
        description="Exit status: 0 every mutant is noticed or equivalent, 1 one is not.",
    )
    mutants.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        if arguments.command == "check":
            return check_command(arguments)
        if arguments.command == "mutants":
            return mutants_command(arguments)
        return run_command(arguments, list(sys.argv[1:] if argv is None else argv))
    except (ScenarioError, TraceError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\nsim: interrupted; the trace holds what was written so far.", file=sys.stderr)
        return INTERRUPTED


def _fail(message: str) -> int:
    print(f"sim: {message}", file=sys.stderr)
    return BAD_INPUT


def check_command(arguments: argparse.Namespace) -> int:
    """`check`: judges the traces of a run and prints what is broken."""
    from sim.checks import check_traces

    traces = read_traces(arguments.trace)
    violations = check_traces(traces)
    cut = [trace.rank for trace in traces if not trace.is_complete]
    num_records = sum(len(trace.records) for trace in traces)
    if arguments.json:
        print(
            json.dumps(
                {
                    "passed": not violations,
                    "ranks": len(traces),
                    "num_records": num_records,
                    "incomplete_ranks": cut,
                    "violations": [violation.as_dict() for violation in violations],
                }
            )
        )
    else:
        for violation in violations:
            print(violation)
        if cut:
            print(f"cut short on rank {', '.join(map(str, cut))}: the end was not judged")
        print(f"{len(violations)} violations in {num_records} records of {len(traces)} ranks")
    return DIFFERS if violations else 0


def mutants_command(arguments: argparse.Namespace) -> int:
    """`mutants`: runs every mutant and prints what noticed it."""
    from sim.quiet import quiet

    quiet()
    from sim.mutants import run_mutants

    progress = _no_progress if arguments.json else _progress_line()
    verdicts = run_mutants(progress=progress)
    progress("")
    survived = [v.name for v in verdicts if v.killed_by is None and v.equivalent is None]
    if arguments.json:
        print(
            json.dumps(
                {
                    "total": len(verdicts),
                    "killed": sum(v.killed_by is not None for v in verdicts),
                    "survived": survived,
                    "equivalent": [
                        v.name for v in verdicts if v.killed_by is None and v.equivalent
                    ],
                }
            )
        )
        return DIFFERS if survived else 0
    for verdict in verdicts:
        if verdict.killed_by is not None:
            print(f"killed      {verdict.name} ({verdict.scenario}): {verdict.killed_by}")
        elif verdict.equivalent is not None:
            print(f"equivalent  {verdict.name}: {verdict.equivalent}")
        else:
            print(f"SURVIVED    {verdict.name}")
    print(f"{len(verdicts) - len(survived)} of {len(verdicts)} noticed or equivalent")
    return DIFFERS if survived else 0


def run_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """`run`: trains the scenario and its reference and prints how they compare."""
    scenario = load_scenario(arguments.scenario).changed(**scenario_overrides(arguments))
    out = arguments.out or Path("runs") / arguments.scenario.stem
    replay = f"python -m sim {shlex.join(argv)}"
    # Imported late: bad input is answered before torch and Megatron load.
    from sim.quiet import quiet

    quiet()
    from real.mcore.versions import UnsupportedVersion, check_megatron_version

    try:
        check_megatron_version()
    except UnsupportedVersion as error:
        return _fail(str(error))
    from sim.runner import open_sinks, run_in_process
    from sim.world.world import WorldError

    progress = _progress_line() if not arguments.json else _no_progress
    try:
        if arguments.world == "gloo":
            from sim.world.gloo import run_gloo

            result = run_gloo(scenario, out=out, progress=progress, replay=replay)
        else:
            result = run_in_process(
                scenario,
                schedule_seed=arguments.schedule_seed,
                sinks=open_sinks(out, scenario.world_size),
                out=out,
                replay=replay,
                progress=progress,
                records_kernels=arguments.kernels,
            )
    except WorldError as error:
        progress("")
        print(f"sim: {error}", file=sys.stderr)
        return DIFFERS
    progress("")
    problems = result.problems()
    if arguments.json:
        print(json.dumps(as_json(result)))
    else:
        print(format_table(scenario, result))
    return DIFFERS if problems else 0


def _no_progress(text: str) -> None:
    """Shows nothing."""


def _progress_line() -> Progress:
    """Returns what shows one changing line on a terminal and nothing in a pipe."""
    if not sys.stderr.isatty():
        return _no_progress

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    return show
