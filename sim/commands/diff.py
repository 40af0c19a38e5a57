"""`python -m sim diff`: compares two traces and prints where they part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real.trace import read_traces, why_not_whole
from sim.commands.common import DIFFERS, fail


def add(commands: Any) -> None:
    """Adds the command's parser."""
    diff = commands.add_parser(
        "diff",
        help="compare two traces",
        description="Compares the traces of two runs rank by rank and prints the first difference "
        "of each. Exit status: 0 equal, 1 different or no whole run, 2 no readable trace.",
    )
    diff.add_argument("first", type=Path, help="folder with one file a rank")
    diff.add_argument("second", type=Path, help="the same of the other run")
    diff.add_argument(
        "--canonical",
        action="store_true",
        help="compare what a simulated and a real run must agree in; else every field",
    )
    diff.add_argument("--width", type=int, default=72, metavar="N", help="characters of a column")
    diff.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compares two traces."""
    from sim.diff import compare, side_by_side

    first, second = read_traces(arguments.first), read_traces(arguments.second)
    try:
        result = compare(first, second, is_canonical=arguments.canonical)
    except ValueError as error:
        return fail(str(error))
    not_whole = [
        f"incomplete: {folder}: {reason}"
        for folder, traces in ((arguments.first, first), (arguments.second, second))
        for reason in why_not_whole(traces)
    ]
    is_equal = result.is_equal and not not_whole
    if arguments.json:
        print(json.dumps({**result.as_dict(), "equal": is_equal, "incomplete": not_whole}))
        return 0 if is_equal else DIFFERS
    for key, (one, other) in result.scenario.items():
        print(f"scenario: {key} is {one!r} and {other!r}")
    for difference in result.differences:
        print(f"rank {difference.rank}, {difference.place or 'records'}:")
        for line in side_by_side(difference, width=arguments.width):
            print(line)
    for allowance, count in result.allowed.items():
        print(f"allowed: {allowance.name}: {count}. {allowance.reason}")
    for reason in not_whole:
        print(reason)
    verdict = "different" if not result.is_equal else "equal" if is_equal else "not comparable"
    print(f"{verdict}: {result.num_lines} lines of {result.num_ranks} ranks")
    return 0 if is_equal else DIFFERS
