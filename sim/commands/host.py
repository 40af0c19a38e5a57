"""`python -m sim host`: where the host's time goes in a step of a GPU run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real.trace import read_trace, trace_path


def add(commands: Any) -> None:
    """Adds the command's parser."""
    host = commands.add_parser(
        "host",
        help="where the host's time goes in a step of a GPU run",
        description="Reads a trace of `torchrun -m real trace --durations` and adds up what the "
        "host did in the last step: MFSDP's calls, our hooks, the schedule. Exit status: 0 done, "
        "2 no readable trace or no host times in it.",
    )
    host.add_argument("trace", type=Path, help="folder with one file a rank")
    host.add_argument("--rank", type=int, default=0, metavar="N")
    host.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Adds up and prints."""
    from sim.hosttime import host_costs

    trace = read_trace(trace_path(arguments.trace, arguments.rank))
    costs = host_costs(trace)
    whole = sum(cost.total_ns for cost in costs)
    if arguments.json:
        rows = [asdict(cost) for cost in costs]
        print(json.dumps({"rank": trace.rank, "step_ns": whole, "costs": rows}))
        return 0
    print(f"host time of the last step on rank {trace.rank}: {whole / 1e6:.1f} ms")
    print(f"{'what':<36} {'calls':>7} {'ms':>9} {'us each':>9} {'share':>7}")
    for cost in costs:
        each = f"{cost.total_ns / cost.calls / 1e3:.1f}" if cost.calls else ""
        print(
            f"{cost.what:<36} {cost.calls:>7} {cost.total_ns / 1e6:>9.1f} {each:>9} "
            f"{cost.share:>7.1%}"
        )
    return 0
