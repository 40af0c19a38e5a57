"""Gradients of the microbatches of a step are added up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.accumulation import check_accumulation

Story = Callable[..., Trace]

FIRST = "0: reduce layers.0\n1: reduce_scatter of layers.0 6 -> 8\n1: {first} 8 -> 7"
SECOND = "0: reduce layers.0\n1: reduce_scatter of layers.0 6 -> 9\n1: {second} 9 -> 7"
STEP = f"step begin 0\n{FIRST}\n{SECOND}\n0: grad_read\n0: optimizer\nstep end 0"


def _rules(story: Story, text: str) -> list[str]:
    trace = story(f"name 7 layers.0:main gradient\n{text}")
    return [v.rule for v in check_accumulation([trace])]


@pytest.mark.parametrize(
    ("first", "second", "rules"),
    [
        ("copy_", "add_", []),
        ("copy_", "copy_", ["I13"]),
        ("copy_", "zero_", ["I13"]),
        ("add_", "add_", []),
    ],
)
def test_a_later_microbatch_adds(story: Story, first: str, second: str, rules: list[str]) -> None:
    """The first may do either: nobody knows what the buffer held before the trace."""
    assert _rules(story, STEP.format(first=first, second=second)) == rules


@pytest.mark.parametrize(("is_second", "rules"), [(False, []), (True, ["I13"])])
def test_a_reduction_straight_into_the_gradient_overwrites_it(
    story: Story, is_second: bool, rules: list[str]
) -> None:
    """A group of one rank does the same."""
    straight = "0: reduce layers.0\n1: reduce_scatter of layers.0 6 -> 7"
    first = FIRST.format(first="copy_")
    added = SECOND.format(second="add_")
    text = f"{first}\n{straight}" if is_second else f"{straight}\n1: div_ -> 7\n{added}"
    assert _rules(story, f"step begin 0\n{text}") == rules


def test_a_reduction_in_place_is_no_overwrite(story: Story) -> None:
    """The outer axis of a hybrid mesh reduces what is there."""
    outer = "1: all_reduce of layers.0 7 -> 7"
    assert _rules(story, f"step begin 0\n{FIRST.format(first='copy_')}\n{outer}") == []


@pytest.mark.parametrize(
    ("clear", "first", "rules"),
    [("", "copy_", []), ("", "add_", ["I13"]), ("0: zero_ -> 7", "add_", [])],
    ids=["starts anew", "adds to the old", "adds to zeros"],
)
def test_the_next_step_starts_from_nothing(
    story: Story, clear: str, first: str, rules: list[str]
) -> None:
    """Else the gradient grows from step to step."""
    step = STEP.format(first="copy_", second="add_")
    following = STEP.format(first=first, second="add_").replace("begin 0", "begin 1")
    assert _rules(story, f"{step}\n{clear}\n{following}") == rules


def test_clipping_is_neither(story: Story) -> None:
    """It changes the gradient in place after it was read."""
    assert _rules(story, f"{FIRST.format(first='copy_')}\n0: grad_read\n0: mul_ -> 7") == []


def test_a_report_names_unit_microbatch_and_write(story: Story) -> None:
    """One report a unit: all microbatches have the same fault."""
    node = "node mlp backward layers.0 1"
    text = f"step begin 0\n{FIRST}\n{node}\n{SECOND}\n{SECOND}".format(
        first="copy_", second="copy_"
    )
    [violation] = check_accumulation([story(f"name 7 layers.0:main gradient\n{text}")])
    assert (violation.unit, violation.microbatch) == ("layers.0", 1)
    assert violation.message == (
        "copy_ overwrites the gradient of unit layers.0 that an earlier microbatch of the step "
        "left there."
    )
