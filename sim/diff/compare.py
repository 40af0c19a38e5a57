"""Compares two runs rank by rank and finds the first difference of each."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from real.trace import Trace
from sim.diff.allowances import ALLOWANCES, Allowance
from sim.diff.canonical import CanonicalTrace, Line, canonical

CONTEXT: Final = 3
"""Equal lines shown before a difference, and after it."""

MOST_ROWS: Final = 16
"""Lines shown of one difference."""

_WINDOW: Final = 60
"""Lines after the first difference that are looked at: the rest may follow from it."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two traces of one rank part.

    Attributes:
        rank: The rank.
        place: The section, as "step 0".
        rows: Lines of both around it, aligned; None where one side has no such line.
    """

    rank: int
    place: str
    rows: tuple[tuple[Line | None, Line | None], ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the difference as plain data."""
        return {
            "rank": self.rank,
            "place": self.place,
            "rows": [
                [None if line is None else {"seq": line.seq, "text": line.text} for line in row]
                for row in self.rows
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome.

    Attributes:
        differences: The first one of each rank that has one.
        scenario: Keys of the scenario with different values.
        num_lines: Lines compared, over all ranks.
        num_ranks: Ranks compared.
        allowed: Permitted differences and records left out, counted.
    """

    differences: tuple[Difference, ...]
    scenario: dict[str, tuple[Any, Any]]
    num_lines: int
    num_ranks: int
    allowed: dict[Allowance, str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs but what may."""
        return not self.differences and not self.scenario

    def as_dict(self) -> dict[str, Any]:
        """Returns the outcome as plain data."""
        return {
            "equal": self.is_equal,
            "num_lines": self.num_lines,
            "num_ranks": self.num_ranks,
            "scenario": {key: list(values) for key, values in self.scenario.items()},
            "differences": [difference.as_dict() for difference in self.differences],
            "allowed": [
                {"name": allowance.name, "reason": allowance.reason, "count": count}
                for allowance, count in self.allowed.items()
            ],
        }


def compare(first: Sequence[Trace], second: Sequence[Trace], *, is_canonical: bool) -> Comparison:
    """Compares two runs of equally many ranks, or the ranks that both have of partial ones.

    Args:
        first: One trace a rank.
        second: The same of the other run.
        is_canonical: Compare the canonical forms; else every field of every record.

    Raises:
        ValueError: The runs have different numbers of ranks, or none in common.
    """
    if any(trace.peers == "loopback" for trace in (*first, *second)):
        first, second = _shared_ranks(first, second)
    if len(first) != len(second):
        raise ValueError(
            f"Expected two runs of equally many ranks, got {len(first)} and {len(second)}."
        )
    form = canonical if is_canonical else _exact
    pairs = [(form(a), form(b)) for a, b in zip(first, second, strict=True)]
    differences = (_first_difference(a, b) for a, b in pairs)
    return Comparison(
        differences=tuple(d for d in differences if d is not None),
        scenario=_scenario_differences(first[0].scenario, second[0].scenario),
        num_lines=sum(len(a.lines) for a, _ in pairs),
        num_ranks=len(pairs),
        allowed=_allowed(pairs),
    )


def _shared_ranks(
    first: Sequence[Trace], second: Sequence[Trace]
) -> tuple[list[Trace], list[Trace]]:
    shared = {trace.rank for trace in first} & {trace.rank for trace in second}
    if not shared:
        of_first, of_second = ([trace.rank for trace in run] for run in (first, second))
        raise ValueError(f"Expected a rank that both runs have, got {of_first} and {of_second}.")
    return (
        [trace for trace in first if trace.rank in shared],
        [trace for trace in second if trace.rank in shared],
    )


def _exact(trace: Trace) -> CanonicalTrace:
    return CanonicalTrace(
        rank=trace.rank,
        lines=[Line(json.dumps(record), record["seq"], "") for record in trace.records],
    )


def _scenario_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys((*a, *b))
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _allowed(pairs: Sequence[tuple[CanonicalTrace, CanonicalTrace]]) -> dict[Allowance, str]:
    """Says for each allowance how often it was needed."""
    differing: Counter[Allowance] = Counter()
    left_out: tuple[Counter[Allowance], Counter[Allowance]] = (Counter(), Counter())
    for a, b in pairs:
        left_out[0].update(a.left_out)
        left_out[1].update(b.left_out)
        for one, other in zip(a.lines, b.lines, strict=False):
            if one.text != other.text:
                break  # what follows is not the same record
            if one.allowance is not None and one.detail != other.detail:
                differing[one.allowance] += 1
    counts: dict[Allowance, str] = {}
    for allowance in ALLOWANCES:
        if differing[allowance]:
            counts[allowance] = f"{differing[allowance]} differ"
        elif left_out[0][allowance] or left_out[1][allowance]:
            counts[allowance] = (
                f"{left_out[0][allowance]} and {left_out[1][allowance]} records left out"
            )
    return counts


def _first_difference(a: CanonicalTrace, b: CanonicalTrace) -> Difference | None:
    start = next(
        (
            number
            for number, (one, other) in enumerate(zip(a.lines, b.lines, strict=False))
            if one.text != other.text
        ),
        min(len(a.lines), len(b.lines)),
    )
    if start == len(a.lines) == len(b.lines):
        return None
    before = slice(max(0, start - CONTEXT), start)
    after = slice(start, start + _WINDOW)
    shown = zip(a.lines[before], b.lines[before], strict=True)
    rows = (*shown, *_aligned(a.lines[after], b.lines[after]))
    at = a.lines[start] if start < len(a.lines) else b.lines[start]
    return Difference(rank=a.rank, place=at.place, rows=rows)


def _aligned(a: Sequence[Line], b: Sequence[Line]) -> list[tuple[Line | None, Line | None]]:
    """Aligns two stretches that differ at once, up to a few equal lines after the difference."""
    matcher = difflib.SequenceMatcher(
        None, [line.text for line in a], [line.text for line in b], autojunk=False
    )
    rows: list[tuple[Line | None, Line | None]] = []
    for tag, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if tag == "equal":
            rows += zip(a[a_from:a_to][:CONTEXT], b[b_from:b_to][:CONTEXT], strict=True)
            break
        for offset in range(max(a_to - a_from, b_to - b_from)):
            one = a[a_from + offset] if a_from + offset < a_to else None
            other = b[b_from + offset] if b_from + offset < b_to else None
            rows.append((one, other))
    return rows


def side_by_side(difference: Difference, *, width: int = 72) -> list[str]:
    """Returns a difference as text, both runs beside each other."""
    lines = []
    for one, other in difference.rows[:MOST_ROWS]:
        is_equal = one is not None and other is not None and one.text == other.text
        mark = " " if is_equal else ">"
        lines.append(f"{mark} {_cell(one, width):<{width}} | {_cell(other, width)}".rstrip())
    if len(difference.rows) > MOST_ROWS:
        lines.append(f"  and {len(difference.rows) - MOST_ROWS} further lines")
    return lines


def _cell(line: Line | None, width: int) -> str:
    if line is None:
        return "-"
    text = f"{line.seq:>6} {line.text}"
    return text if len(text) <= width else f"{text[: width - 3]}..."
