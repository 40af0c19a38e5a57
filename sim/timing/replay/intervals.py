"""Sets of times as sorted lists of intervals that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns when any of the intervals is on."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> int:
    """Returns the length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def overlap(first: list[Interval], second: list[Interval]) -> int:
    """Returns for how long two unions are on together."""
    length = place = 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            length += min(end, second[at][1]) - max(start, second[at][0])
            at += 1
    return length
