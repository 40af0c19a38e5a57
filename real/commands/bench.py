"""`torchrun -m real bench`: times variants of one or more scenarios by turns.

With `--peers loopback` it is `python -m real bench`, and one GPU stands for one rank of any job.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from real.commands.common import (
    CONFIGS,
    add_peers,
    add_scenario,
    add_watch,
    fail,
    hosted_of,
    is_first_rank,
    read_scenario,
    scenario_of,
    seat_of,
)
from real.config import Scenario
from real.flags import add_hosting_flags
from real.targets import Hosted
from real.variants import VARIANTS, variants_of

GRID = CONFIGS / "grid"


def add(commands: Any) -> None:
    """Adds the command's parser."""
    bench = commands.add_parser("bench", help="time variants of a scenario by turns")
    add_scenario(bench, "bench-b.toml")
    bench.add_argument(
        "--variants",
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(VARIANTS)} (default: with and without MFSDP v2; of "
        "another target its plain and its combined schedule)",
    )
    bench.add_argument("--repeats", type=int, default=5, metavar="N")
    bench.add_argument(
        "--grid",
        nargs="?",
        type=Path,
        const=GRID,
        metavar="FOLDER",
        help="time every scenario file of a folder, in the order of their names, and print one "
        f"JSON object a line (default folder: {GRID.name})",
    )
    bench.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="with --grid: visits to each scenario, as a host's speed drifts (default: 1)",
    )
    bench.add_argument("--out", type=Path, metavar="FILE", help="with --grid: also write there")
    add_hosting_flags(bench)
    add_peers(bench)
    add_watch(bench)


def run(arguments: argparse.Namespace) -> int:
    """Times the variants; the first rank prints the medians."""
    hosted = hosted_of(arguments)
    names = list(variants_of(hosted.target))
    if arguments.variants is not None:
        names = arguments.variants.split(",")
    for flag in ("repeats", "rounds"):
        if getattr(arguments, flag) < 1:
            return fail(f"Expected --{flag} of 1 or more, got {getattr(arguments, flag)}.")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        return fail(f"Expected variants among {', '.join(VARIANTS)}; got {unknown}.")
    if arguments.grid is not None:
        return _run_grid(arguments, names, hosted)
    if arguments.out is not None or arguments.rounds != 1:
        return fail("Expected --out and --rounds with --grid only.")
    seat = seat_of(arguments)
    scenario = scenario_of(arguments, is_launched=seat is None)
    from real.gpu.bench import run_bench
    from real.gpu.watchdog import watched

    # Without records: they would be part of what is timed.
    with watched(
        timeout_s=arguments.timeout, folder=arguments.report, has_records=False
    ) as progress:
        results = run_bench(
            scenario,
            names,
            repeats=arguments.repeats,
            hosted=hosted,
            seat=seat,
            on_progress=progress,
        )
    if is_first_rank():
        if arguments.json:
            print(json.dumps(results))
        else:
            if seat is not None:
                print(f"rank {seat.rank} of {seat.world_size}, {seat.as_dict()['note']}")
            for name, values in results.items():
                peak = values["peak_bytes_above_rest"] / 2**30
                print(f"{name:>20}  {values['step_ms']:>9.2f} ms  {peak:>7.2f} GiB above rest")
                for call, cost in values["host"].items():
                    print(f"{'':>20}  {cost['count']:>9} x {call}, {cost['own_us']} us of the host")
    return 0


def _run_grid(arguments: argparse.Namespace, variants: list[str], hosted: Hosted) -> int:
    seat = seat_of(arguments)
    scenarios: dict[str, Scenario] = {
        path.stem: read_scenario(path, arguments, is_launched=seat is None)
        for path in sorted(arguments.grid.glob("*.toml"))
    }
    if not scenarios:
        return fail(f"Expected scenario files in {arguments.grid}, found none.")
    if len({(s.world_size, s.expert_model_parallel_size) for s in scenarios.values()}) > 1:
        return fail("Expected scenarios of equal parallel sizes in a grid, got different ones.")
    from real.gpu.bench import Results, run_grid
    from real.gpu.watchdog import watched

    if arguments.out is not None and is_first_rank():
        try:
            arguments.out.write_text("")
        except OSError as error:
            return fail(f"{arguments.out}: cannot write there: {error.strerror}.")
    known: dict[str, str] = {}
    visits = dict.fromkeys(scenarios, 0)

    def report(name: str, results: Results) -> None:
        if not is_first_rank():
            return
        lines = [
            json.dumps({"config": name, "variant": variant, **values})
            for variant, values in results.items()
        ]
        known[name] = "\n".join(lines) + "\n"
        visits[name] += 1
        if visits[name] == arguments.rounds:
            print(known[name], end="", flush=True)
        if arguments.out is not None:
            # Put in place whole: a run killed here leaves what the one before wrote.
            part = arguments.out.with_name(f"{arguments.out.name}.part")
            part.write_text("".join(known.values()))
            part.replace(arguments.out)

    with watched(
        timeout_s=arguments.timeout, folder=arguments.report, has_records=False
    ) as progress:
        run_grid(
            scenarios,
            variants,
            repeats=arguments.repeats,
            rounds=arguments.rounds,
            report=report,
            hosted=hosted,
            seat=seat,
            on_progress=progress,
        )
    return 0
