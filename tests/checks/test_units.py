"""The life of units: each rule has a story that breaks it and a twin that keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks import judge
from sim.checks.units import check_units, most_unsharded

Story = Callable[..., Trace]


def _found(trace: Trace) -> list[tuple[str, str | None, int | None]]:
    return [(v.rule, v.unit, v.seq) for v in check_units([trace])]


# -- I1, I2, I3: gathered once, released once ------------------------------------------------


def test_a_gather_and_its_release_are_silent(story: Story) -> None:
    """As often as it takes, one after the other."""
    trace = story("""
        step begin 0
        1: unshard layers.0
        1: reshard layers.0
        1: unshard layers.0
        1: reshard layers.0
        step end 0
    """)
    assert _found(trace) == []


def test_a_second_gather_of_an_unsharded_unit_is_found(story: Story) -> None:
    """It is traffic for nothing, and it writes under the readers of the first."""
    trace = story("1: unshard layers.0\n1: unshard layers.0\n1: reshard layers.0")
    assert _found(trace) == [("I2", "layers.0", 2)]


def test_asking_for_an_unsharded_unit_again_is_no_second_gather(story: Story) -> None:
    """An unshard that finds the unit gathered launches nothing."""
    assert _found(story("1: unshard layers.0\n1: again layers.0\n1: reshard layers.0")) == []


def test_two_units_may_be_unsharded_at_the_same_time(story: Story) -> None:
    """Rules are for one unit."""
    trace = story("""
        1: unshard layers.0
        1: unshard layers.1
        1: reshard layers.0
        1: reshard layers.1
        step end 0
    """)
    assert _found(trace) == []


def test_a_unit_taken_as_unsharded_that_is_not_is_found(story: Story) -> None:
    """The forward would read a released buffer."""
    trace = story("1: unshard layers.0\n1: reshard layers.0\n1: again layers.0")
    assert _found(trace) == [("I1", "layers.0", 3)]


@pytest.mark.parametrize("event", ["begin", "end"])
def test_a_unit_left_unsharded_is_found_at_the_border_of_a_step(story: Story, event: str) -> None:
    """Nobody would release it: the next step's gather finds it done, with old weights."""
    assert _found(story(f"1: unshard layers.0\nstep {event} 0")) == [("I3", "layers.0", 2)]


def test_a_unit_left_unsharded_is_reported_once(story: Story) -> None:
    """The end of a step and the begin of the next are one border."""
    trace = story("1: unshard layers.0\nstep end 0\nstep begin 1\nstep end 1")
    assert _found(trace) == [("I3", "layers.0", 2)]


def test_a_second_release_is_found(story: Story) -> None:
    """The second one may hit a gather that was started in between."""
    trace = story("1: unshard layers.0\n1: reshard layers.0\n1: reshard layers.0")
    assert _found(trace) == [("I3", "layers.0", 3)]


# -- I20: memory -----------------------------------------------------------------------------

COMBINED = {"overlap_moe_expert_parallel_comm": True, "prefetch": "none"}


@pytest.mark.parametrize(("num_units", "rules"), [(3, []), (4, ["I20"]), (5, ["I20"])])
def test_unsharded_units_are_bounded(story: Story, num_units: int, rules: list[str]) -> None:
    """One too many is reported, once a run."""
    gathers = "\n".join(f"1: unshard layers.{n}" for n in range(num_units))
    trace = story(gathers, scenario=COMBINED)
    assert [v.rule for v in check_units([trace])] == rules


def test_the_bound_is_for_the_combined_schedule(story: Story) -> None:
    """Elsewhere torch's or Megatron's own hooks decide."""
    gathers = "\n".join(f"1: unshard layers.{n}" for n in range(6))
    assert check_units([story(gathers)]) == []


@pytest.mark.parametrize(
    ("order", "rules"),
    [
        ("1: reduce layers.0\n1: reshard layers.0", ["I20"]),
        ("1: reshard layers.0\n1: reduce layers.0", []),
    ],
    ids=["reduced first", "released first"],
)
def test_weights_are_released_before_the_gradient_buffer_is_made(
    story: Story, order: str, rules: list[str]
) -> None:
    """Both at the same time are two full buffers of one unit."""
    trace = story(f"1: unshard layers.0\nhook post_gradient layers.0\n{order}")
    assert [v.rule for v in check_units([trace])] == rules


# -- reports ---------------------------------------------------------------------------------


def test_a_report_names_rank_unit_node_microbatch_and_hook(story: Story) -> None:
    """What a reader needs to find the place."""
    trace = story(
        """
        node mlp forward layers.2 1
        hook pre_forward layers.2
        1: unshard layers.2
        1: unshard layers.2
        """,
        rank=3,
    )
    [violation] = check_units([trace])
    assert str(violation).splitlines() == [
        "I2: Unit layers.2 is gathered while it is unsharded.",
        "  at rank 3, unit layers.2, node mlp forward of layers.2, microbatch 1, record 4",
        "  after hook: pre_forward of layers.2",
    ]


def test_the_hook_of_another_node_is_not_named(story: Story) -> None:
    """It ended with its node."""
    trace = story("""
        node mlp forward layers.2 1
        hook pre_forward layers.2
        end mlp forward
        1: reshard layers.2
    """)
    [violation] = check_units([trace])
    assert (violation.hook, violation.node, violation.microbatch) == (None, None, None)


# -- I20: whose bound --------------------------------------------------------------------------


def test_a_target_declares_its_own_bound(story: Story) -> None:
    """Other hooks have another policy than ours, whatever the scenario says."""
    text = "\n".join(f"1: unshard layers.{n}" for n in range(3))
    ours = {"overlap_moe_expert_parallel_comm": True, "prefetch": "none"}
    two = dataclasses.replace(story(text, scenario=ours), header={"bounds": {"unsharded": 2}})
    assert [rule for rule, *_ in _found(two)] == ["I20"]
    assert [rule for rule, *_ in _found(story(text, scenario=ours))] == []
    assert most_unsharded(two) == 2


def test_without_a_bound_nothing_is_too_many(story: Story) -> None:
    """And the rule is said to be not judged."""
    trace = story("1: unshard a\n1: reshard a\nstep end 0")
    assert most_unsharded(trace) is None
    assert judge([trace]).reach.not_judged["I20"] == "no bound of unsharded units"


# -- I9: weights held over the optimizer's step ------------------------------------------------

HELD = """
    1: unshard layers.0
    {before}
    0: optimizer
    step end 0
    step begin 1
    {after}
    1: again layers.0
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1: reshard layers.0", "1: unshard layers.0"),
        ("", "1: reshard layers.0\n1: unshard layers.0"),
    ],
    ids=["released before", "released and gathered after"],
)
def test_weights_gathered_after_the_optimizer_step_are_new(
    story: Story, before: str, after: str
) -> None:
    """The good story, whenever the old ones went."""
    found = check_units([story(HELD.format(before=before, after=after))])
    assert "I9" not in [violation.rule for violation in found]


def test_weights_gathered_before_the_optimizer_step_are_old(story: Story) -> None:
    """Silent: the gather finds the unit done, and the step runs with last step's weights."""
    found = check_units([story(HELD.format(before="", after=""))])
    assert [(v.rule, v.unit, v.seq) for v in found] == [
        ("I3", "layers.0", 3),
        ("I9", "layers.0", 5),
    ]
    old = found[-1]
    assert old.first is not None
    assert old.second is not None
    assert (old.first.seq, old.second.seq) == (1, 5)
    assert old.missing == "no gather of layers.0 after the optimizer step in record 2"


def test_old_weights_are_reported_once_a_step(story: Story) -> None:
    """And again in the next step, if they are still there."""
    text = HELD.format(before="", after="") + "1: again layers.0"
    again = "\n0: optimizer\nstep end 1\n1: again layers.0"
    rules = [violation.rule for violation in check_units([story(text + again)])]
    assert rules.count("I9") == 2


def test_frozen_weights_do_not_grow_old(story: Story) -> None:
    """No optimizer writes them."""
    trace = story("unit layers.0 frozen" + HELD.format(before="", after=""))
    assert "I9" not in [violation.rule for violation in check_units([trace])]
