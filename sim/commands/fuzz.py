"""`python -m sim fuzz`: runs a scenario under many orders and shrinks the first failure."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.config import Scenario, load_scenario
from real.flags import add_scenario_flags, scenario_overrides
from sim.commands.common import (
    DEFAULT_SCENARIO,
    DIFFERS,
    INTERRUPTED,
    add_fault_flag,
    fail,
    faults_of,
    no_progress,
    progress_line,
)

if TYPE_CHECKING:
    from sim.faults import Fault
    from sim.fuzz.run import FuzzResult
    from sim.fuzz.seeds import Failure, Setting

_DESCRIPTION = """\
Runs a scenario under many legal orders. A correct run comes out the same under each of them.

First, once: the scenario with schedule seed 0, twice. With kernels, judged by all checks and
compared with the run without FSDP; and without kernels. Then each seed covers
  1. one whole run with the seed's own order of the ranks' turns, up to three delays of ranks, and
     in two of three seeds turns given up before collectives: every record of every rank, all
     losses, gradients and weights equal the first run's to the last bit (without kernels; every
     --kernels-every-th seed with them);
  2. --device-orders orders of what the devices run, as the first run recorded it: streams in
     order, event, stream and host waits, collectives that meet over their group and end at
     different times, freed memory that is given out again; hosts, streams and collectives late
     at random. Every read has to see the write that it saw in host order, no memory is used after
     it was released or given out again, and nothing waits for ever. No vector clock is asked.
The same seed always runs the same orders. A failure is printed with the command that repeats it,
and the first one is made as short as it can be: steps, microbatches, layers, ranks, faults.

Exit status: 0 no failure, 1 failures, 2 bad input."""


def add(commands: Any) -> None:
    """Adds the command's parser."""
    fuzz = commands.add_parser(
        "fuzz",
        help="run a scenario under many orders of its ranks and devices",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fuzz.add_argument(
        "scenario", nargs="?", type=Path, default=DEFAULT_SCENARIO, help="a TOML file"
    )
    fuzz.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (100)")
    fuzz.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first one (0)")
    fuzz.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    fuzz.add_argument(
        "--device-orders", type=int, default=2, metavar="N", help="device orders of a seed (2)"
    )
    fuzz.add_argument(
        "--kernels-every",
        type=int,
        default=50,
        metavar="N",
        help="compare kernels too in one of N seeds (50)",
    )
    fuzz.add_argument(
        "--max-failures", type=int, default=1, metavar="N", help="stop after as many (1)"
    )
    fuzz.add_argument("--no-shrink", action="store_true", help="leave the failure as it is")
    add_fault_flag(fuzz)
    fuzz.add_argument("--json", action="store_true", help="print one JSON object")
    add_scenario_flags(fuzz)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the seeds."""
    base = load_scenario(arguments.scenario)
    scenario = base.changed(**scenario_overrides(arguments))
    faults = faults_of(arguments, scenario)
    jobs = _num_cores() if arguments.jobs is None else arguments.jobs
    for name, value, least in (
        ("--seeds", arguments.seeds, 1),
        ("--first-seed", arguments.first_seed, 0),
        ("--jobs", jobs, 1),
        ("--device-orders", arguments.device_orders, 0),
        ("--kernels-every", arguments.kernels_every, 1),
        ("--max-failures", arguments.max_failures, 1),
    ):
        if value < least:
            return fail(f"Expected {name} of {least} or more, got {value}.")
    if not hasattr(os, "fork"):
        return fail("Expected a platform that can fork, got one without os.fork.")
    from sim.quiet import quiet

    quiet()
    from real.mcore.versions import UnsupportedVersion, check_megatron_version

    try:
        check_megatron_version()
    except UnsupportedVersion as error:
        return fail(str(error))
    from sim.fuzz.run import fuzz
    from sim.fuzz.seeds import Setting

    setting = Setting(
        scenario=scenario,
        faults=faults,
        num_orders=arguments.device_orders,
        kernels_every=arguments.kernels_every,
    )
    progress = no_progress if arguments.json else progress_line()
    result = fuzz(
        setting,
        range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        jobs=jobs,
        max_failures=arguments.max_failures,
        shrinks=not arguments.no_shrink,
        progress=progress,
    )
    progress("")
    path = None if arguments.scenario == DEFAULT_SCENARIO else arguments.scenario
    commands = _Commands(path, base)
    if arguments.json:
        print(json.dumps(_as_json(arguments, result, setting, commands)))
    else:
        print(_as_text(result, setting, commands))
    if result.is_interrupted:
        print("sim: interrupted; the seeds that ended by then are above.", file=sys.stderr)
        return INTERRUPTED
    return DIFFERS if result.failures else 0


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Commands:
    """Writes the command that repeats one seed of one setting."""

    def __init__(self, path: Path | None, base: Scenario) -> None:
        self._path = path
        self._base = base

    def flags(self, scenario: Scenario, faults: Sequence[Fault]) -> str:
        """Returns the flags that say how a setting differs from the file."""
        from sim.faults import format_fault
        from sim.fuzz.shrink import scenario_flags

        words = list(scenario_flags(self._base, scenario))
        for fault in faults:
            words += ["--fault", format_fault(fault)]
        return shlex.join(words)

    def repeat(self, setting: Setting, failure: Failure) -> str:
        """Returns the command."""
        words = ["python", "-m", "sim", "fuzz", *([str(self._path)] if self._path else [])]
        words += ["--first-seed", str(failure.seed or 0), "--seeds", "1"]
        words += ["--device-orders", str(setting.num_orders)]
        words += ["--kernels-every", str(setting.kernels_every)]
        flags = self.flags(setting.scenario, setting.faults)
        return " ".join([shlex.join(words), *([flags] if flags else [])])


def _as_json(
    arguments: argparse.Namespace, result: FuzzResult, setting: Setting, commands: _Commands
) -> dict[str, Any]:
    shrunk = result.shrunk
    return {
        "passed": not result.failures,
        "seeds": arguments.seeds,
        "first_seed": arguments.first_seed,
        "seeds_run": result.num_seeds,
        "turn_orders": result.num_turn_orders,
        "device_orders": result.num_device_orders,
        "failures": [
            {**failure.as_dict(), "replay": commands.repeat(setting, failure)}
            for failure in result.failures
        ],
        "shrunk": None
        if shrunk is None
        else {
            **shrunk.failure.as_dict(),
            "flags": commands.flags(shrunk.setting.scenario, shrunk.setting.faults),
            "replay": commands.repeat(shrunk.setting, shrunk.failure),
            "trials": shrunk.num_trials,
        },
        "interrupted": result.is_interrupted,
        "wall_s": round(result.wall_s, 3),
    }


def _as_text(result: FuzzResult, setting: Setting, commands: _Commands) -> str:
    scenario = setting.scenario
    lines = []
    for failure in result.failures:
        where = "The first run fails" if failure.seed is None else f"Seed {failure.seed} fails"
        lines.append(f"{where} ({failure.kind}): {failure.problem}")
        lines.append(f"Replay: {commands.repeat(setting, failure)}")
    if result.shrunk is not None:
        shrunk = result.shrunk
        flags = commands.flags(shrunk.setting.scenario, shrunk.setting.faults)
        lines.append(f"Shortest that still fails, of {shrunk.num_trials} tried: {flags}")
        lines.append(f"  {shrunk.failure.problem.splitlines()[0]}")
        lines.append(f"Replay: {commands.repeat(shrunk.setting, shrunk.failure)}")
    lines.append(
        f"{result.num_seeds} seeds of {scenario.world_size} ranks, {scenario.num_layers} layers, "
        f"{scenario.num_microbatches} microbatches, {scenario.train_iters} steps: "
        f"{result.num_turn_orders} different orders of turns, "
        f"{result.num_device_orders} of the devices, {len(result.failures)} failures, "
        f"{result.wall_s:.1f} s"
    )
    return "\n".join(lines)
