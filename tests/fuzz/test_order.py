"""Orders of the devices: what a missing wait does, and that correct traces have nothing to show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.storage import check_storage
from sim.faults import StallCollective, StallStream
from sim.orders.findings import stalls_of, violation_of
from sim.orders.order import RELEASED, REUSED, Outcome, Stalls, run_order
from sim.orders.program import build_program

Story = Callable[..., Trace]
Orders = Callable[..., list[Outcome]]

# Each story is correct; a line marked with * is what keeps it so.
STORIES = {
    "a read waits for the write": """
        0: fill -> 7
        0: record 1
        * 1: wait 1
        1: mm 7 -> 8
    """,
    "a write waits for the read": """
        0: fill -> 7
        0: record 1
        1: wait 1
        1: mm 7 -> 8
        * 0: wait stream 1
        0: fill -> 7
    """,
    "two writes are in order": """
        0: fill -> 7
        * 1: wait stream 0
        1: fill -> 7
        0: wait stream 1
        0: mm 7 -> 8
    """,
    "the newest record of an event counts": """
        0: fill -> 7
        0: record 1
        0: fill -> 7
        * 0: record 1
        1: wait 1
        1: mm 7 -> 8
    """,
    "the host waits for a stream": """
        0: fill -> 7
        * host waits stream 0
        1: mm 7 -> 8
    """,
    "the host waits for an event": """
        0: fill -> 7
        0: record 1
        * host waits event 1
        1: mm 7 -> 8
    """,
    "the host waits for the device": """
        0: fill -> 7
        * host waits device
        1: mm 7 -> 8
    """,
    "a collective waits for its input": """
        group dp 0
        0: fill -> 7
        * 1: wait stream 0
        1: all_gather 7 -> 8
        0: wait stream 1
        0: mm 8 -> 9
    """,
    "another stream joins a collective": """
        group dp 0
        1: all_gather 7 -> 8
        * 0: joins dp 0
        0: mm 8 -> 9
    """,
    "a release waits for the reader": """
        1: allocate 7 64
        1: fill -> 7
        0: wait stream 1
        0: mm 7 -> 8
        * 1: wait stream 0
        1: resize 7 64 0
    """,
    "memory brought back is filled first": """
        1: resize 7 64 0
        1: resize 7 0 64
        1: fill -> 7
        * 0: wait stream 1
        0: mm 7 -> 8
    """,
    "a freed block waits for its other user": """
        1: allocate 7 64
        1: fill -> 7
        0: wait stream 1
        0: mm 7 -> 8
        * 1: wait stream 0
        free 7
        1: allocate 9 64
        1: fill -> 9
    """,
    "the allocator is told of the other user": """
        1: allocate 7 64
        1: fill -> 7
        0: wait stream 1
        * 0: record_stream 7
        0: mm 7 -> 8
        free 7
        1: allocate 9 64
        1: fill -> 9
    """,
}


def _correct(text: str) -> str:
    return text.replace("* ", "")


def _broken(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "* " not in line)


@pytest.mark.parametrize("name", STORIES)
def test_a_correct_trace_has_nothing_to_show(story: Story, orders: Orders, name: str) -> None:
    trace = story(_correct(STORIES[name]))
    assert check_storage([trace]) == []
    assert [outcome for outcome in orders(trace) if not outcome.is_good] == []


@pytest.mark.parametrize("name", STORIES)
def test_what_the_clocks_find_an_order_shows(story: Story, orders: Orders, name: str) -> None:
    """Some orders, not all: without the wait it is a matter of luck, as on a GPU."""
    trace = story(_broken(STORIES[name]))
    assert check_storage([trace]) != []
    shown = [outcome for outcome in orders(trace) if outcome.surprise is not None]
    assert 0 < len(shown) < 40


def test_a_smaller_block_cannot_be_given_out(story: Story, orders: Orders) -> None:
    text = _broken(STORIES["a freed block waits for its other user"]).replace("9 64", "9 65")
    assert all(outcome.is_good for outcome in orders(story(text)))


def test_a_use_after_free_needs_no_luck(story: Story, orders: Orders) -> None:
    """It is in host order already."""
    outcomes = orders(story("0: fill -> 7\nfree 7\n0: resize 8 64 0\n0: mm 8 -> 9"), count=5)
    assert [outcome.late is not None for outcome in outcomes] == [True] * 5


@pytest.mark.parametrize(
    ("name", "found", "rule"),
    [
        ("a read waits for the write", 0, "I1"),
        ("a release waits for the reader", RELEASED, "I4"),
        ("a freed block waits for its other user", REUSED, "I10"),
    ],
)
def test_a_finding_names_rule_rank_and_both_accesses(
    story: Story, name: str, found: int, rule: str
) -> None:
    trace = story("group dp 0\n" + _broken(STORIES[name]))
    program = build_program([trace])
    outcomes = [run_order(program, seed) for seed in range(40)]
    outcome = next(o for o in outcomes if o.surprise is not None and o.surprise.found == found)
    violation = violation_of(outcome, program, [trace])
    assert violation is not None
    assert (violation.rule, violation.rank) == (rule, 0)
    assert violation.first is not None
    assert violation.second is not None
    assert violation.second.what == "mm"


def test_orders_of_different_seeds_differ_and_of_one_seed_do_not(
    story: Story, orders: Orders
) -> None:
    lines = [f"{k % 3}: mm {k} -> {k + 1}\n{(k + 1) % 3}: wait stream {k % 3}" for k in range(12)]
    trace = story("\n".join(lines))
    digests = [outcome.digest for outcome in orders(trace)]
    assert digests == [outcome.digest for outcome in orders(trace)]
    assert len(set(digests)) > 30


# -- several ranks ----------------------------------------------------------------------------

GATHER = "group dp 0 1\n1: all_gather 7 -> 8\n"


def test_collectives_meet_over_their_group(story: Story, orders: Orders) -> None:
    """A rank that never comes leaves the other one waiting, in every order."""
    ranks = [story(GATHER, rank=0, world_size=2), story("group dp 0 1", rank=1, world_size=2)]
    assert all(outcome.stuck for outcome in orders(*ranks, count=5))


def test_collectives_crossed_over_two_streams_wait_for_ever_in_every_order(
    story: Story, orders: Orders
) -> None:
    """Each rank's stream waits for the group that the other rank has put behind it."""
    groups = "group dp 0 1\ngroup tp 0 1\n"
    first = story(groups + "1: all_gather 7 -> 8\n1: all_gather in tp 7 -> 9", world_size=2)
    second = story(
        groups + "1: all_gather in tp 7 -> 8\n1: all_gather 7 -> 9", rank=1, world_size=2
    )
    outcomes = orders(first, second, count=5)
    assert all(len(outcome.stuck) == 2 for outcome in outcomes)
    violation = violation_of(outcomes[0], build_program([first, second]), [first, second])
    assert "rank 0 stream 1, rank 1 stream 1" in str(violation)


def test_a_collective_may_end_late_on_one_rank_only(story: Story, orders: Orders) -> None:
    """Its reader on another stream needs a wait, even when the other rank is long done."""
    ranks = [
        story(GATHER + "0: mm 8 -> 9", rank=0, world_size=2),
        story(GATHER + "0: wait stream 1\n0: mm 8 -> 9", rank=1, world_size=2),
    ]
    shown = {o.surprise.rank for o in orders(*ranks) if o.surprise is not None}
    assert shown == {0}


# -- stalls -----------------------------------------------------------------------------------


def test_a_stalled_stream_is_late_in_every_order(story: Story) -> None:
    """Its reader has no wait: luck is out of the game."""
    trace = story(_broken(STORIES["a read waits for the write"]))
    program = build_program([trace])
    stalls, missed = stalls_of([StallStream(rank=0, stream="compute")], program)
    assert missed == []
    outcomes = [run_order(program, seed, stalls) for seed in range(20)]
    assert all(outcome.surprise is not None for outcome in outcomes)


def test_a_stalled_collective_is_late_in_every_order(story: Story) -> None:
    trace = story("group dp 0\n1: all_gather of layers.0 7 -> 8\n0: mm 8 -> 9")
    program = build_program([trace])
    stalls, missed = stalls_of([StallCollective(rank=0, unit="layers.0")], program)
    assert (missed, len(stalls.calls)) == ([], 1)
    for seed in range(20):
        assert run_order(program, seed, stalls).surprise is not None


@pytest.mark.parametrize(
    "fault",
    [
        StallStream(rank=0, stream="reduce_scatter"),
        StallStream(rank=0, stream="7"),
        StallStream(rank=1, stream="compute"),
        StallCollective(rank=0, unit="layers.1"),
        StallCollective(rank=0, n=1),
    ],
)
def test_a_stall_that_means_nothing_is_told(
    story: Story, fault: StallStream | StallCollective
) -> None:
    program = build_program([story("group dp 0\n1: all_gather of layers.0 7 -> 8\n0: mm 8 -> 9")])
    assert stalls_of([fault], program) == (Stalls(), [fault])
