"""Gradients: complete, in their place, and reduced once a microbatch."""

from __future__ import annotations

import dataclasses
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


# -- I5, I6, I7: as declared -----------------------------------------------------------------

DECLARED = """
    parameter layers.0.w of layers.0 x 2
    parameter layers.0.b of layers.0 x 1
    step begin 0
    node mlp backward layers.0 0
"""
COMPLETE = """
    hook post_gradient layers.0.w of layers.0
    hook post_gradient layers.0.w of layers.0
    hook post_gradient layers.0.b of layers.0
"""
REDUCED = """
    0: reduce layers.0
    gradients layers.0 present layers.0.w layers.0.b
"""


def _rules(trace: Trace) -> list[str]:
    return [v.rule for v in check_gradients([trace])]


def test_as_many_gradients_as_declared_are_silent(story: Story) -> None:
    """In every microbatch anew."""
    again = f"end mlp backward\nnode mlp backward layers.0 1\n{COMPLETE}\n{REDUCED}"
    scenario = {"num_microbatches": 2}
    text = f"{DECLARED}\n{COMPLETE}\n{REDUCED}\n{again}\n0: optimizer"
    assert _rules(story(text, scenario=scenario)) == []


@pytest.mark.parametrize(
    ("fires", "rules"),
    [
        (COMPLETE.replace("hook", "step begin 0\nhook", 1), []),
        (COMPLETE + "hook post_gradient layers.0.b of layers.0", ["I5"]),
        (COMPLETE.replace("post_gradient layers.0.b", "post_gradient layers.0.w"), ["I5", "I5"]),
        ("hook post_gradient layers.0.w of layers.0", ["I5", "I5"]),
    ],
    ids=["exact", "one over", "over for one and none for the other", "one short, one without"],
)
def test_gradients_are_counted_against_the_declaration(
    story: Story, fires: str, rules: list[str]
) -> None:
    """Also when the hooks' own countdown is what is wrong."""
    assert _rules(story(f"{DECLARED}\n{fires}\n{REDUCED}")) == rules


def test_a_parameter_filled_with_zeros_has_no_gradient_to_count(story: Story) -> None:
    """It was not used in this microbatch; half of its gradients would be another matter."""
    used = "hook post_gradient layers.0.w of layers.0\n" * 2
    filled = f"{DECLARED}\n{used}zero_fill layers.0.b of layers.0\n{REDUCED}"
    assert _rules(story(filled)) == []
    half = "hook post_gradient layers.0.w of layers.0\nzero_fill layers.0.w of layers.0"
    assert _rules(story(f"{DECLARED}\n{half}\nzero_fill layers.0.b of layers.0\n{REDUCED}")) == [
        "I5"
    ]


def test_zeros_are_for_one_microbatch(story: Story) -> None:
    """The next one starts with nothing."""
    used = "hook post_gradient layers.0.w of layers.0\n" * 2
    first = f"{DECLARED}\n{used}zero_fill layers.0.b of layers.0\n{REDUCED}"
    second = f"end mlp backward\nnode mlp backward layers.0 1\n{used}{REDUCED}"
    assert _rules(story(f"{first}\n{second}")) == ["I5"]


@pytest.mark.parametrize("end", ["0: optimizer", "step end 0", "0: optimizer\nstep end 0"])
def test_a_countdown_held_open_is_found_at_the_end_of_the_step(story: Story, end: str) -> None:
    """Short is not over: nothing raises, and the optimizer steps without this gradient."""
    text = f"{DECLARED}\nhook post_gradient layers.0.b of layers.0\nend mlp backward\n{end}"
    found = check_gradients([story(text, scenario={"num_microbatches": 1})])
    assert [(v.rule, v.unit) for v in found] == [("I5", "layers.0")] * 2
    assert "reduced 0 times in a step, not 1." in found[0].message
    assert "after the last gradients of layers.0.b" in found[1].message


def test_a_unit_that_declares_nothing_need_not_be_reduced(story: Story) -> None:
    """A frozen one, or a model under MFSDP's own hooks."""
    text = "parameter layers.0.w of layers.0 x 0\nstep begin 0\n0: optimizer"
    assert _rules(story(text, scenario={"num_microbatches": 2})) == []


def test_a_gradient_that_is_not_there_is_found(story: Story) -> None:
    """Counted is not the same as present."""
    reduced = REDUCED.replace("layers.0.w layers.0.b", "layers.0.w missing layers.0.b")
    [violation] = check_gradients([story(f"{DECLARED}\n{COMPLETE}\n{reduced}")])
    assert (violation.rule, violation.unit, violation.microbatch) == ("I6", "layers.0", 0)
    assert violation.message == "Unit layers.0 is reduced without a gradient of layers.0.b."


DELAYED = """
    parameter layers.0.w of layers.0 x 1 delayed
    node mlp backward layers.0 0
    hook pre_backward layers.0
    end mlp backward
    node mlp wgrad layers.0 0
    {inside}
    end mlp wgrad
    {after}
"""


@pytest.mark.parametrize(
    ("inside", "after", "rules"),
    [
        ("hook post_gradient layers.0.w of layers.0\n0: reduce layers.0", "", []),
        ("hook post_gradient layers.0.w of layers.0", "0: reduce layers.0", []),
        ("", "hook post_gradient layers.0.w of layers.0\n0: reduce layers.0", ["I7"]),
        ("", "0: reduce layers.0", ["I7"]),
        ("", "0: reduce layers.0\ngradients layers.0 present missing layers.0.w", ["I7", "I7"]),
    ],
    ids=["inside", "reduced later", "counted elsewhere", "not counted", "not there"],
)
def test_a_delayed_gradient_comes_from_its_own_call(
    story: Story, inside: str, after: str, rules: list[str]
) -> None:
    """The backward of the node makes none for it."""
    assert _rules(story(DELAYED.format(inside=inside, after=after))) == rules


def test_a_target_declares_how_often_a_unit_is_reduced(story: Story) -> None:
    """One that accumulates on the device reduces once a step."""
    text = """
        parameter a.w of a x 1
        step begin 0
        2: reduce a
        step end 0
    """
    four = {"num_microbatches": 4}
    assert _rules(story(text, scenario=four)) == ["I5"]
    once = dataclasses.replace(story(text, scenario=four), header={"bounds": {"reductions": 1}})
    assert _rules(once) == []
