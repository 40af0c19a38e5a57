"""All ranks of a communicator call the same collectives in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.collectives import check_collectives

Story = Callable[..., Trace]

GATHERS = """
    group dp 0 1
    1: all_gather of layers.0 6 -> 7
    1: all_gather of layers.1 8 -> 9
"""


def test_equal_ranks_are_silent(story: Story) -> None:
    """The good twin of all that follows."""
    assert check_collectives([story(GATHERS), story(GATHERS, rank=1)]) == []


def test_swapped_order_is_named_with_both_calls(story: Story) -> None:
    """NCCL pairs calls by order, so each rank would get the other layer's weights."""
    swapped = story(
        """
        group dp 0 1
        1: all_gather of layers.1 8 -> 9
        1: all_gather of layers.0 6 -> 7
        """,
        rank=1,
    )
    [violation] = check_collectives([story(GATHERS), swapped])
    assert (violation.rule, violation.rank, violation.unit, violation.seq) == (
        "I11",
        1,
        "layers.1",
        2,
    )
    assert violation.message == (
        "Call 0 of group dp is all_gather of unit layers.1 here and all_gather of unit layers.0 on "
        "rank 0."
    )


def test_different_kinds_of_one_unit_are_a_difference(story: Story) -> None:
    """A gather meets a reduction."""
    other = story("group dp 0 1\n1: reduce_scatter of layers.0 6 -> 7", rank=1)
    found = check_collectives([story("group dp 0 1\n1: all_gather of layers.0 6 -> 7"), other])
    assert [violation.rule for violation in found] == ["I11"]


def test_a_call_missing_at_the_end_is_found(story: Story) -> None:
    """The other ranks would wait for it forever."""
    short = story("group dp 0 1\n1: all_gather of layers.0 6 -> 7", rank=1)
    [violation] = check_collectives([story(GATHERS), short])
    assert (violation.rule, violation.rank) == ("I12", 1)
    assert violation.message == (
        "Group dp has 1 calls here and 2 on rank 0; the first that has no partner is all_gather of "
        "unit layers.1."
    )


def test_a_rank_without_any_call_is_found(story: Story) -> None:
    """It is a member by its group record alone."""
    found = check_collectives([story(GATHERS), story("group dp 0 1", rank=1)])
    assert [(violation.rule, violation.rank) for violation in found] == [("I12", 1)]


def test_only_the_first_difference_of_a_group_is_reported(story: Story) -> None:
    """All that follows is off by one."""
    shifted = [
        story("group dp 0 1 2\n1: all_gather of layers.1 8 -> 9", rank=rank) for rank in (1, 2)
    ]
    reference = story("group dp 0 1 2\n1: all_gather of layers.0 6 -> 7\n1: all_reduce 1 -> 1")
    found = check_collectives([reference, *shifted])
    assert [(violation.rule, violation.rank) for violation in found] == [("I11", 1)]


def test_groups_have_an_order_each(story: Story) -> None:
    """How calls of two communicators mix is each rank's own affair."""
    one = story("group dp 0 1\ngroup ep 0 1\n1: all_gather 6 -> 7\n0: all_reduce in ep 8 -> 8")
    two = story(
        "group dp 0 1\ngroup ep 0 1\n0: all_reduce in ep 8 -> 8\n1: all_gather 6 -> 7", rank=1
    )
    assert check_collectives([one, two]) == []


def test_groups_of_one_name_and_other_members_are_kept_apart(story: Story) -> None:
    """Every pair of ranks calls its group ep; what one pair does is nothing to the other."""
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    kinds = {(0, 1): "all_gather", (2, 3): "all_reduce"}
    traces = [
        story(f"group ep {pair[0]} {pair[1]}\n0: {kinds[pair]} in ep 6 -> 7", rank=rank)
        for rank, pair in pairs.items()
    ]
    assert check_collectives(traces) == []


def test_a_difference_inside_one_of_two_equal_names_is_found(story: Story) -> None:
    """Kept apart does not mean left out, and the reference is the lowest rank of that pair."""
    kinds = ["all_gather", "all_gather", "all_gather", "all_reduce"]
    pairs = ["0 1", "0 1", "2 3", "2 3"]
    traces = [
        story(f"group ep {pair}\n0: {kind} in ep 6 -> 7", rank=rank)
        for rank, (pair, kind) in enumerate(zip(pairs, kinds, strict=True))
    ]
    [violation] = check_collectives(traces)
    assert violation.rank == 3
    assert violation.message == "Call 0 of group ep is all_reduce here and all_gather on rank 2."


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ("all_gather sized 32 float32", "all_gather sized 64 float32", True),
        ("all_gather sized 64 bfloat16", "all_gather sized 64 float32", True),
        ("reduce_scatter sized 32 float32", "reduce_scatter sized 64 float32", True),
        ("all_to_all_single sized 32 float32", "all_to_all_single sized 64 float32", False),
        ("all_to_all_single sized 32 bfloat16", "all_to_all_single sized 32 float32", True),
        ("all_reduce sized 64 float32", "all_reduce sized 64 float32", False),
    ],
)
def test_size_and_element_type_agree_where_they_have_to(
    story: Story, one: str, two: str, found: bool
) -> None:
    """An exchange of tokens is uneven by nature; a gather of shards is not."""
    traces = [
        story(f"group dp 0 1\n0: {call} 6 -> 7", rank=rank) for rank, call in enumerate((one, two))
    ]
    assert [v.rule for v in check_collectives(traces)] == ["I11"] * found


def test_a_difference_is_told_with_both_calls_and_their_places(story: Story) -> None:
    """The two ranks are at different places of the schedule, and that is the clue."""
    one = story("""
        group dp 0 1
        node attn forward layers.0 0
        hook pre_forward layers.0
        1: all_gather of layers.0 sized 32 bfloat16 6 -> 7
    """)
    two = story(
        """
        group dp 0 1
        node mlp backward layers.1 1
        1: reduce_scatter of layers.1 6 -> 7
        """,
        rank=1,
    )
    [violation] = check_collectives([one, two])
    assert str(violation).splitlines() == [
        (
            "I11: Call 0 of group dp is reduce_scatter of unit layers.1 here and all_gather of "
            "unit layers.0 on rank 0."
        ),
        "  at rank 1, unit layers.1, node mlp backward of layers.1, microbatch 1, record 3",
        (
            "  first:  all_gather of unit layers.0 with 32 bytes of bfloat16 on rank 0 "
            "(record 4, stream 1, attn forward of layers.0, microbatch 0, "
            "after pre_forward of layers.0)"
        ),
        (
            "  second: reduce_scatter of unit layers.1 with 64 bytes of float32 on rank 1 "
            "(record 3, stream 1, mlp backward of layers.1, microbatch 1)"
        ),
    ]


def test_messages_are_matched_per_pair_and_direction(story: Story) -> None:
    """Where one rank sends the other receives, and the ends of a pipeline have fewer of both."""
    one = story("0: send to 1 in pp 6\n0: recv from 1 in pp -> 7")
    two = story("0: recv from 0 in pp -> 6\n0: send to 0 in pp 7", rank=1)
    assert check_collectives([one, two]) == []


@pytest.mark.parametrize(
    ("received", "end"),
    [
        ("", "is sent and never received."),
        ("0: recv from 0 in pp sized 32 float32 -> 6", "received as 32 bytes of float32."),
        ("0: recv from 0 in pp sized 64 int64 -> 6", "received as 64 bytes of int64."),
        ("0: recv from 0 in pp -> 6\n0: recv from 0 in pp -> 6", "is received and never sent."),
    ],
)
def test_a_message_without_its_match_is_found(story: Story, received: str, end: str) -> None:
    """One side would wait forever, or take the bytes for something else."""
    [violation] = check_collectives([story("0: send to 1 in pp 6"), story(received, rank=1)])
    assert violation.rule == "I11"
    assert violation.message.endswith(end)


def test_one_rank_has_nobody_to_differ_from(story: Story) -> None:
    """A trace may be looked at alone."""
    assert check_collectives([story(GATHERS)]) == []


def test_a_rank_that_was_cut_short_owes_no_partner(story: Story) -> None:
    """It may have ended before its call; that the trace was cut short is said by itself."""
    call = "1: all_gather of layers.0 1 -> 2"
    longer, shorter = story(f"{call}\n{call}"), story(call, rank=1)
    assert [violation.rule for violation in check_collectives([longer, shorter])] == ["I12"]
    cut = dataclasses.replace(shorter, is_complete=False, why_incomplete="no end record")
    assert check_collectives([longer, cut]) == []
    # What both did is compared all the same.
    other = story("1: reduce_scatter of layers.0 1 -> 2", rank=1)
    cut = dataclasses.replace(other, is_complete=False, why_incomplete="no end record")
    assert [violation.rule for violation in check_collectives([longer, cut])] == ["I11"]
