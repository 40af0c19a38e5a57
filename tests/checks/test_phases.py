"""Phases of units and profiler ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.hooks.lifecycle import TRANSITIONS
from real.trace import Trace
from sim.checks.phases import LEGAL, check_phases

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


# -- I18: phases -----------------------------------------------------------------------------

LIFE = """
    phase layers.0 resting > forward by use in forward
    phase layers.0 forward > forward and backward by use in backward
    phase layers.0 forward and backward > backward by release after forward
    phase layers.0 backward > resting by end of backward
    0: reshard layers.0
    step end 0
"""


def test_the_life_of_a_unit_is_silent(story: Story) -> None:
    """Two microbatches are in flight, so both intervals may be open."""
    assert _found(story(LIFE)) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("phase layers.0 resting > backward by use in forward", "no legal step"),
        ("phase layers.0 forward > resting by release after forward", "is in 'resting'"),
        (LIFE.replace("backward by release", "resting by release"), "no legal step"),
        (f"{LIFE.splitlines()[1]}\n0: reshard layers.0", "released in phase 'forward'"),
        (f"{LIFE.splitlines()[1]}\nstep end 0", "in phase 'forward' at the end of a step"),
    ],
    ids=["wrong step", "not where it was", "skips one", "released while in use", "left open"],
)
def test_a_phase_that_is_not_in_the_table_is_found(story: Story, text: str, part: str) -> None:
    """The table is said again here, so a fault in the hooks' own shows."""
    found = check_phases([story(text)])
    assert found
    assert found[0].rule == "I18"
    assert found[0].unit == "layers.0"
    assert part in found[0].message


def test_the_table_is_that_of_the_hooks() -> None:
    """Two copies that drift apart would judge each other."""
    changes = {
        (before.value, event.value, after.value)
        for (before, event), after in TRANSITIONS.items()
        if before is not after
    }
    assert changes == LEGAL
