"""`torchrun -m real calibrate`: measures kernels, links and host calls of this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from real.commands.common import add_scenario, add_watch, is_first_rank, scenario_of


def add(commands: Any) -> None:
    """Adds the command's parser."""
    calibrate = commands.add_parser(
        "calibrate",
        help="measure kernels, links and host calls of this machine",
        description="Writes raw measurements; `python -m sim fit` makes a cost file of them.",
    )
    add_scenario(calibrate, "bench-b.toml")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help="a JSON file")
    add_watch(calibrate)


def run(arguments: argparse.Namespace) -> int:
    """Measures on all ranks; the first rank writes."""
    scenario = scenario_of(arguments)
    from real.gpu.calibrate import run_calibration
    from real.gpu.watchdog import watched

    def report(part: str) -> None:
        progress(f"what came before {part}")
        if is_first_rank() and not arguments.json:
            print(f"measuring: {part}", flush=True)

    def save(results: dict[str, Any]) -> None:
        if is_first_rank():
            arguments.out.write_text(json.dumps(results, separators=(",", ":")) + "\n")

    # Without records: they would be part of what is timed.
    with watched(
        timeout_s=arguments.timeout, folder=arguments.report, has_records=False
    ) as progress:
        results = run_calibration(scenario, report=report, save=save)
    if is_first_rank():
        summary = {"out": str(arguments.out), "wall_s": results["wall_s"]}
        summary |= {"seconds": results["seconds"], "errors": results["errors"]}
        if arguments.json:
            print(json.dumps(summary))
        else:
            print(f"{arguments.out}: {results['wall_s']} s")
            for part, error in results["errors"].items():
                print(f"not measured: {part}: {error}")
    return 0
