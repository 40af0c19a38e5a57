"""`python -m sim whatif`: times variants of a trace and says which differences are real."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real.trace import read_traces
from sim.commands.common import fail, no_progress, progress_line
from sim.commands.time import add_cluster
from sim.timing.answers.plot import PlotError, check_plot, draw
from sim.timing.answers.variants import KNOBS, KnobError, Part, parse_setting
from sim.timing.answers.whatif import Grid, band_line, table, what_if
from sim.timing.costs.costfile import CostError, load_cluster
from sim.timing.replay.program import ReplayError

_BAR = 24


def add(commands: Any) -> None:
    """Adds the command's parser."""
    own = [f"{k.name} ({k.help})" for k in KNOBS.values() if k.part != Part.SCENARIO]
    parser = commands.add_parser(
        "whatif",
        help="vary knobs of a trace and compare step times",
        description="Times variants of a trace. Two --set make a grid. Exit status: 0 done, 2 bad "
        "input.",
        epilog=f"Knobs: {'; '.join(own)}; ep, delay-wgrad, prefetch, num-microbatches and every "
        "other key of a scenario, for which the scenario runs again.",
    )
    parser.add_argument("trace", type=Path, help="folder with one file a rank")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2,...",
        dest="settings",
        help="values of a knob; repeat for a grid",
    )
    add_cluster(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Times every variant."""
    started = time.perf_counter()
    show = no_progress if arguments.json else progress_line()

    def progress(done: int, total: int) -> None:
        full = _BAR * done // total
        show(f"[{'#' * full}{'.' * (_BAR - full)}] {done} of {total} variants")

    try:
        settings = dict(parse_setting(text) for text in arguments.settings)
        if not settings:
            return fail("Expected at least one --set KNOB=VALUE,..., got none.")
        if arguments.jobs is not None and arguments.jobs < 1:
            return fail(f"Expected --jobs of 1 or more, got {arguments.jobs}.")
        if arguments.plot is not None:
            check_plot(arguments.plot, list(settings))
        grid = Grid(
            traces=read_traces(arguments.trace),
            cluster=load_cluster(arguments.cluster),
            settings=settings,
            step=arguments.step,
        )
        rows = what_if(grid, progress=progress, jobs=arguments.jobs)
        if arguments.plot is not None:
            draw(arguments.plot, rows, title=f"{arguments.trace.name} on {grid.cluster.name}")
    except (CostError, KnobError, PlotError, ReplayError) as error:
        show("")
        return fail(str(error))
    show("")
    wall_s = round(time.perf_counter() - started, 3)
    if arguments.json:
        print(
            json.dumps(
                {
                    "cluster": grid.cluster.name,
                    "is_measured": grid.cluster.is_measured(),
                    "rows": [row.as_dict() for row in rows],
                    "wall_s": wall_s,
                }
            )
        )
        return 0
    print(table(rows))
    print(band_line(grid.cluster))
    if arguments.plot is not None:
        print(f"plot: {arguments.plot}")
    print(f"{len(rows)} variants in {wall_s:.1f} s")
    return 0
