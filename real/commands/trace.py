"""`torchrun -m real trace`: trains scenarios and writes what each rank did.

With `--peers loopback` it is `python -m real trace`, and one GPU stands for one rank of any job.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.commands.common import (
    CONFIGS,
    add_peers,
    add_watch,
    fail,
    hosted_of,
    is_first_rank,
    read_scenario,
    seat_of,
)
from real.config import Scenario
from real.flags import add_hosting_flags, add_scenario_flags

if TYPE_CHECKING:
    from real.gpu.trace import TraceResult

_PARALLEL = ("expert_model_parallel_size", "num_distributed_optimizer_instances")


def add(commands: Any) -> None:
    """Adds the command's parser."""
    trace = commands.add_parser(
        "trace",
        help="train and write what each rank did",
        description="Trains and writes the trace that the simulation writes: one "
        "file a rank, for `python -m sim check` and `python -m sim diff --canonical`. Exit "
        "status: 0 recorded, 2 bad input or machine.",
    )
    trace.add_argument("scenarios", nargs="*", type=Path, metavar="scenario", help="TOML files")
    add_scenario_flags(trace)
    add_hosting_flags(trace)
    trace.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of the trace; of several scenarios, a folder each in it, named as the file",
    )
    trace.add_argument(
        "--warmup",
        type=int,
        default=1,
        metavar="N",
        help="forwards and backwards before, without a record: libraries compile in the first",
    )
    trace.add_argument(
        "--durations",
        action="store_true",
        help="also record when the host issued each record and the device ran collectives and "
        "nodes",
    )
    trace.add_argument(
        "--timed",
        type=int,
        default=0,
        metavar="N",
        help="then time N steps with and without a record, by turns",
    )
    add_peers(trace)
    add_watch(trace)
    trace.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Records every scenario; the first rank prints what it has."""
    hosted = hosted_of(arguments)
    seat = seat_of(arguments)
    files: list[Path] = arguments.scenarios or [CONFIGS / "parity.toml"]
    for name in ("timed", "warmup"):
        if getattr(arguments, name) < 0:
            return fail(f"Expected --{name} of 0 or more, got {getattr(arguments, name)}.")
    scenarios: dict[Path, Scenario] = {}
    for file in files:
        out = arguments.out if len(files) == 1 else arguments.out / file.stem
        if out in scenarios:
            return fail(f"Expected scenario files of different names, got {file.stem} twice.")
        scenarios[out] = read_scenario(file, arguments, is_launched=seat is None)
    first = next(iter(scenarios.values()))
    for out, scenario in scenarios.items():
        different = [key for key in _PARALLEL if getattr(scenario, key) != getattr(first, key)]
        if different:
            return fail(f"Expected equal {different[0]} in all scenarios, got another in {out}.")
    from real.gpu.trace import run_traces
    from real.gpu.watchdog import watched

    # Without records of its own: the trace has them.
    with watched(
        timeout_s=arguments.timeout, folder=arguments.report, has_records=False
    ) as progress:
        results = run_traces(
            scenarios,
            hosted=hosted,
            seat=seat,
            num_warmup=arguments.warmup,
            has_durations=arguments.durations,
            num_timed=arguments.timed,
            on_progress=progress,
        )
    if not is_first_rank():
        return 0
    _print(arguments, results)
    return 0


def _print(arguments: argparse.Namespace, results: Mapping[Path, TraceResult]) -> None:
    if arguments.json:
        print(json.dumps({str(out): result.as_dict() for out, result in results.items()}))
        return
    for out, result in results.items():
        print(f"{out}: {result.text()}")
        if result.overhead is not None:
            print(
                f"  a step takes {result.plain_ms:.2f} ms, with a record {result.recorded_ms:.2f} "
                f"({result.overhead:+.1%})"
            )
