"""`python -m sim time`: replays a trace in time and says where the step's time goes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from real.trace import read_traces
from sim.commands.common import fail
from sim.timing.answers.report import report, text
from sim.timing.costs.costfile import CostError, load_cluster
from sim.timing.replay.program import ReplayError

DEFAULT_CLUSTER: Final = "h200-x2"


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "time",
        help="replay a trace in time",
        description="Replays one step of a trace with kernel shapes in time: step time, what is "
        "exposed and what is hidden, critical path, peak memory. A model, not a measurement. Exit "
        "status: 0 done, 2 bad input.",
    )
    parser.add_argument("trace", type=Path, help="folder with one file a rank")
    add_cluster(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="time as N ranks: the trace's ranks are repeated along the data-parallel axis",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is replayed on what."""
    parser.add_argument(
        "--cluster",
        default=DEFAULT_CLUSTER,
        metavar="FILE",
        help=f"a cost file, or the name of one in fixtures/costs (default: {DEFAULT_CLUSTER})",
    )
    parser.add_argument("--step", type=int, help="optimizer step (default: the last one)")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Replays a trace."""
    started = time.perf_counter()
    try:
        cluster = load_cluster(arguments.cluster)
        traces = read_traces(arguments.trace)
        result = report(traces, cluster, step=arguments.step, num_ranks=arguments.ranks)
    except (CostError, ReplayError) as error:
        return fail(str(error))
    result["wall_s"] = round(time.perf_counter() - started, 3)
    print(json.dumps(result) if arguments.json else text(result))
    return 0
