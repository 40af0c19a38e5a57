"""`python -m sim run`: trains a scenario and its reference and prints how they compare."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real.config import load_scenario
from real.flags import add_scenario_flags, scenario_overrides
from real.result import as_json, format_table
from sim.commands.common import (
    DEFAULT_SCENARIO,
    DIFFERS,
    add_fault_flag,
    fail,
    faults_of,
    no_progress,
    progress_line,
)
from sim.faults import needs_kernels


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
    run.add_argument("--world", choices=("inprocess", "gloo"), default="inprocess")
    run.add_argument("--out", type=Path, help="folder of the trace (default: runs/SCENARIO)")
    run.add_argument(
        "--kernels",
        action="store_true",
        help="also record kernels with the storages they read and write, and check their order",
    )
    add_fault_flag(run)
    run.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Trains the scenario and its reference."""
    scenario = load_scenario(arguments.scenario).changed(**scenario_overrides(arguments))
    faults = faults_of(arguments, scenario)
    if faults and arguments.world == "gloo":
        return fail("Expected --world inprocess with --fault, got gloo.")
    out = arguments.out or Path("runs") / arguments.scenario.stem
    replay = f"python -m sim {shlex.join(argv)}"
    # Imported late: bad input is answered before torch and Megatron load.
    from sim.quiet import quiet

    quiet()
    from real.mcore.versions import UnsupportedVersion, check_megatron_version

    try:
        check_megatron_version()
    except UnsupportedVersion as error:
        return fail(str(error))
    from sim.runner import open_sinks, run_in_process
    from sim.world.world import WorldError

    progress = progress_line() if not arguments.json else no_progress
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
                faults=faults,
                progress=progress,
                records_kernels=arguments.kernels or any(map(needs_kernels, faults)),
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
