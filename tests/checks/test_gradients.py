"""Gradients: complete, in their place, and reduced once a microbatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks import Violation
from sim.checks.gradients import check_gradients

Story = Callable[..., Trace]


def _found(trace: Trace) -> list[tuple[str, str | None, int | None]]:
    return [(v.rule, v.unit, v.seq) for v in check_gradients([trace])]


# -- I5, I12: reduced once, by all -----------------------------------------------------------

REDUCED_TWICE = """
    node mlp backward layers.0 0
    1: reduce layers.0
    1: reduce layers.0
    end mlp backward
"""


def test_a_unit_reduced_twice_in_one_microbatch_is_found(story: Story) -> None:
    """Its gradient would count double."""
    [violation] = check_gradients([story(REDUCED_TWICE)])
    assert (violation.rule, violation.unit, violation.microbatch, violation.seq) == (
        "I5",
        "layers.0",
        0,
        3,
    )


def test_a_unit_reduced_three_times_is_reported_once(story: Story) -> None:
    """The third is the same fault."""
    third = REDUCED_TWICE.replace("end", "1: reduce layers.0\nend")
    assert [v.rule for v in check_gradients([story(third)])] == ["I5"]


def test_reductions_outside_of_nodes_are_of_no_microbatch(story: Story) -> None:
    """The plain schedule runs no nodes, and reduces in every microbatch."""
    assert _found(story("1: reduce layers.0\n1: reduce layers.0")) == []


@pytest.mark.parametrize(
    "middle", ["end mlp backward\nnode mlp backward layers.0 1", "step begin 1"]
)
def test_a_unit_is_reduced_once_in_every_microbatch(story: Story, middle: str) -> None:
    """Microbatches are numbered anew in each step."""
    trace = story(f"""
        node mlp backward layers.0 0
        1: reduce layers.0
        {middle}
        1: reduce layers.0
        end mlp backward
    """)
    assert _found(trace) == []


def test_two_units_are_reduced_in_one_microbatch(story: Story) -> None:
    """The count is a unit's own."""
    other = REDUCED_TWICE.replace("reduce layers.0", "reduce layers.1", 1)
    assert _found(story(other)) == []


def test_ranks_reduce_a_unit_equally_often(story: Story) -> None:
    """The good twin: order is another check's affair."""
    one = story("1: reduce layers.0\n1: reduce layers.1")
    two = story("1: reduce layers.1\n1: reduce layers.0", rank=1)
    assert check_gradients([one, two]) == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1: reduce layers.1", (0, 1)),
        ("1: reduce layers.0\n1: reduce layers.1\nstep begin 1\n1: reduce layers.0", (2, 1)),
    ],
    ids=["one less", "one more"],
)
def test_a_rank_that_reduces_another_number_of_times_is_found(
    story: Story, text: str, counts: tuple[int, int]
) -> None:
    """Its partners would wait forever, or pair the call with another unit's."""
    one = story("1: reduce layers.0\n1: reduce layers.1")
    assert check_gradients([one, story(text, rank=1)]) == [
        Violation(
            rule="I12",
            rank=1,
            message=f"Unit layers.0 is reduced {counts[0]} times here and {counts[1]} times on "
            "rank 0.",
            unit="layers.0",
        )
    ]
