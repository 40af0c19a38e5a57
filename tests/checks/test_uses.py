"""I1 from hooks and waits alone: a unit that is used has been waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.uses import check_uses

Story = Callable[..., Trace]

GATHER = """
    step begin 0
    hook pre_forward layers.0
    1: all_gather of layers.0 6 -> 7
    1: record 5
    0: unshard layers.0
"""


@pytest.mark.parametrize(
    "wait", ["0: wait 5", "0: wait stream 1", "host waits stream 1", "host waits device"]
)
def test_a_use_after_a_wait_is_silent(wait: str, story: Story) -> None:
    """Whoever waits, and by whatever means."""
    trace = story(f"""{GATHER}
        {wait}
        hook pre_forward layers.0
        0: again layers.0
        step begin 1
    """)
    assert check_uses([trace]) == []


@pytest.mark.parametrize("end", ["hook pre_forward layers.1", "end mlp forward", "step begin 1"])
def test_a_use_without_a_wait_names_unit_gather_and_use(end: str, story: Story) -> None:
    """At the latest when the next hook runs or the node or the step ends."""
    (violation,) = check_uses([story(f"{GATHER}\n{end}")])
    assert (violation.rule, violation.unit, violation.seq) == ("I1", "layers.0", 5)
    assert violation.first is not None
    assert violation.second is not None
    assert (violation.first.seq, violation.second.seq) == (3, 5)
    assert violation.missing == (
        "stream 0 never waits for all_gather of layers.0 on stream 1 in record 3"
    )
    assert violation.hook == "pre_forward of layers.0"


def test_a_wait_for_an_older_gather_is_not_enough(story: Story) -> None:
    """The unit was given back and gathered again since."""
    trace = story(f"""{GATHER}
        0: wait 5
        0: reshard layers.0
        hook pre_backward layers.0
        1: all_gather of layers.0 6 -> 7
        0: unshard layers.0
        0: wait 5
        step begin 1
    """)
    assert [(v.rule, v.hook) for v in check_uses([trace])] == [("I1", "pre_backward of layers.0")]


def test_each_stream_that_uses_a_unit_has_to_wait(story: Story) -> None:
    """What one stream has waited for says nothing about another."""
    trace = story(f"""{GATHER}
        0: wait 5
        hook pre_forward layers.0
        2: again layers.0
        step begin 1
    """)
    assert [v.second.stream for v in check_uses([trace]) if v.second is not None] == [2]


def test_a_unit_that_is_gathered_ahead_is_not_used_yet(story: Story) -> None:
    """The hook names the unit that its module reads; what else it gathers is for later."""
    trace = story(f"""{GATHER}
        0: wait 5
        1: all_gather of layers.1 8 -> 9
        0: unshard layers.1
        step begin 1
    """)
    assert check_uses([trace]) == []


def test_a_lost_wait_is_reported_once_a_unit_and_stream(story: Story) -> None:
    """Every later use follows from the first."""
    again = "\n".join(["hook pre_forward layers.0", "0: again layers.0"] * 3)
    assert len(check_uses([story(f"{GATHER}\n{again}\nstep begin 1")])) == 1
