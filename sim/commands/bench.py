"""`python -m sim bench`: measures speed beside peers, one JSON line a figure."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from sim.commands.common import progress_line

SUITES: Final = {
    "race": "sim.bench.race:race_figures",
    "checking": "sim.bench.runs:checking_figures",
    "world": "sim.bench.runs:world_figures",
    "trace": "sim.bench.runs:trace_figures",
    "timing": "sim.bench.timing:figures",
}
"""Functions that return figures, by name."""


def add(commands: Any) -> None:
    """Adds the command's parser."""
    bench = commands.add_parser(
        "bench",
        help="measure speed beside peers",
        description="Prints one JSON line a figure: name, value, unit, peer, peer_value, ratio. "
        "Both are measured in the same run; on a busy machine the ratio is what counts.",
    )
    bench.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"among {', '.join(SUITES)} (default: all)"
    )
    bench.add_argument("--json", action="store_true", help="the same: every line is JSON")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measures and prints."""
    from real.config import ScenarioError
    from sim.quiet import quiet

    unknown = [name for name in arguments.suites if name not in SUITES]
    if unknown:
        raise ScenarioError(f"Expected suites among {', '.join(SUITES)}; got {unknown[0]!r}.")
    quiet()
    progress = progress_line()
    for name in arguments.suites or SUITES:
        progress(f"bench: {name}")
        module, _, function = SUITES[name].partition(":")
        measure: Callable[[], list[Any]] = getattr(importlib.import_module(module), function)
        figures = measure()
        progress("")
        for figure in figures:
            print(json.dumps(figure), flush=True)
    return 0
