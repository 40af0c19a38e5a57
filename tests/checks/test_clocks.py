"""Happens-before between streams: what orders, and what only looks as if it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.clocks import StreamClocks

Story = Callable[..., Trace]


def _at_the_end(trace: Trace) -> StreamClocks:
    clocks = StreamClocks()
    for record in trace.records:
        clocks.advance(record)
    return clocks


def test_a_stream_is_in_order_with_itself(story: Story) -> None:
    """Nobody has to wait for what the same stream did before."""
    assert _at_the_end(story("0: mm -> 1")).is_ordered_after(0, 0, 1)


def test_host_order_alone_orders_nothing(story: Story) -> None:
    """Launched later is not started later: this is the whole reason for the clocks."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            0: mm 1 -> 2
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)


def test_record_and_wait_order_what_was_before_the_record(story: Story) -> None:
    """Work queued after the record is not covered by the wait."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            1: record 5
            1: all_gather -> 2
            0: wait 5
        """)
    )
    assert clocks.is_ordered_after(0, 1, 1)
    assert not clocks.is_ordered_after(0, 1, 3)


def test_a_wait_orders_one_direction_only(story: Story) -> None:
    """The stream that was waited for learns nothing."""
    clocks = _at_the_end(
        story("""
            0: mm -> 1
            1: all_gather -> 2
            1: record 5
            0: wait 5
        """)
    )
    assert not clocks.is_ordered_after(1, 0, 1)


def test_a_record_without_a_wait_orders_nothing(story: Story) -> None:
    """An event is a mark; only the wait is an edge."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            1: record 5
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)


def test_a_wait_keeps_to_the_record_that_was_newest_when_it_was_queued(story: Story) -> None:
    """Recording the event again moves no earlier wait."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            1: record 5
            0: wait 5
            1: all_gather -> 2
            1: record 5
            2: wait 5
        """)
    )
    assert clocks.is_ordered_after(0, 1, 1)
    assert not clocks.is_ordered_after(0, 1, 4)
    assert clocks.is_ordered_after(2, 1, 4)


def test_an_event_recorded_again_elsewhere_loses_the_first_stream(story: Story) -> None:
    """One event for two producers: the wait refers to the second producer alone."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            1: record 5
            2: all_gather -> 2
            2: record 5
            0: wait 5
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)
    assert clocks.is_ordered_after(0, 2, 3)


def test_a_wait_for_an_event_that_was_never_recorded_orders_nothing(story: Story) -> None:
    """As in CUDA, it is no error and returns at once."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            0: wait 5
            1: record 5
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)


def test_a_wait_for_a_stream_orders_all_that_the_stream_has_so_far(story: Story) -> None:
    """And nothing that it gets later."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            0: wait stream 1
            1: all_gather -> 2
        """)
    )
    assert clocks.is_ordered_after(0, 1, 1)
    assert not clocks.is_ordered_after(0, 1, 3)


@pytest.mark.parametrize(
    "wait", ["0: wait 5", "0: wait stream 1", "host waits event 5", "host waits stream 1"]
)
def test_order_is_transitive_over_three_streams(story: Story, wait: str) -> None:
    """Who waits for stream 1 has waited for all that stream 1 had waited for."""
    clocks = _at_the_end(
        story(f"""
            2: mm -> 1
            2: record 4
            1: wait 4
            1: record 5
            {wait}
        """)
    )
    assert clocks.is_ordered_after(0, 2, 1)


def test_order_does_not_pass_through_a_wait_that_came_after_the_record(story: Story) -> None:
    """An event holds what its stream knew when it was recorded."""
    clocks = _at_the_end(
        story("""
            2: mm -> 1
            2: record 4
            1: record 5
            1: wait 4
            0: wait 5
        """)
    )
    assert not clocks.is_ordered_after(0, 2, 1)


@pytest.mark.parametrize("wait", ["host waits stream 1", "host waits event 5", "host waits device"])
def test_a_host_wait_orders_every_later_launch(story: Story, wait: str) -> None:
    """On streams that were in use before it and on streams that were not."""
    clocks = _at_the_end(
        story(f"""
            0: mm -> 2
            1: all_gather -> 1
            1: record 5
            {wait}
        """)
    )
    assert clocks.is_ordered_after(0, 1, 2)
    assert clocks.is_ordered_after(3, 1, 2)


def test_a_host_wait_for_one_stream_says_nothing_of_another(story: Story) -> None:
    """Only the device wait is for all."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            2: mm -> 2
            host waits stream 2
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)


def test_a_host_wait_orders_nothing_launched_after_it(story: Story) -> None:
    """The device is idle at that moment and not for long."""
    clocks = _at_the_end(
        story("""
            host waits device
            1: all_gather -> 1
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 2)


def test_a_host_wait_for_an_event_that_was_never_recorded_orders_nothing(story: Story) -> None:
    """It returns at once."""
    clocks = _at_the_end(
        story("""
            1: all_gather -> 1
            host waits event 5
        """)
    )
    assert not clocks.is_ordered_after(0, 1, 1)


@pytest.mark.parametrize("wait", ["", "0: wait stream 3"])
def test_an_idle_stream_gives_no_order(story: Story, wait: str) -> None:
    """Waiting for the wrong stream is as good as not waiting."""
    clocks = _at_the_end(story(f"1: all_gather -> 1\n{wait}"))
    assert not clocks.is_ordered_after(0, 1, 1)


def test_waiting_for_a_collective_orders_the_waiting_stream(story: Story) -> None:
    """A work object may be waited for on another stream than it was issued on."""
    clocks = _at_the_end(
        story("""
            2: mm -> 6
            1: wait stream 2
            1: all_gather 6 -> 7
            1: all_gather 6 -> 8
            0: joins dp 0
        """)
    )
    assert clocks.is_ordered_after(0, 1, 3)
    assert clocks.is_ordered_after(0, 2, 1)
    assert not clocks.is_ordered_after(0, 1, 4)
