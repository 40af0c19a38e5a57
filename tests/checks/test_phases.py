"""Phases of units and profiler ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.phases import check_phases

Story = Callable[..., Trace]


def _found(trace: Trace) -> list[tuple[str, str | None, int | None]]:
    return [(v.rule, v.unit, v.seq) for v in check_phases([trace])]


# -- I18: profiler ranges --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("push a\npush b\npop\npop\nstep end 0", []),
        ("push a\npop\npop", [("I18", None, 3)]),
        ("push a\nstep end 0\nstep begin 1", [("I18", None, 2)]),
        ("pop\npush a\npop\nstep end 0", [("I18", None, 1)]),
    ],
    ids=["balanced", "one pop too many", "one push too many", "a stray pop is one fault"],
)
def test_profiler_ranges_are_balanced(
    story: Story, text: str, found: list[tuple[str, str | None, int | None]]
) -> None:
    """An open range swallows all that follows in a profile."""
    assert _found(story(text)) == found
