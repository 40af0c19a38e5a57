"""Streams and events say who waits for whom, in host order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Records = list[dict[str, Any]]


def _short(records: Records) -> list[str]:
    """Returns records in short form: `record e0 on 1`, `wait 2 for e0@3`."""
    texts = {
        "stream": "stream {stream} priority {priority}",
        "event_record": "@{seq} record e{event} on {stream}",
        "event_wait": "wait {stream} for e{event}@{record}",
        "stream_wait": "wait {stream} for stream {on}",
        "host_sync": "host waits for {what} {on}",
        "nvtx_push": "push {text}",
        "nvtx_pop": "pop",
    }
    return [texts[record["op"]].format(**record) for record in records]


def test_streams_are_numbered_in_order_with_their_priority(records: Records) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    assert [stream.stream_id for stream in streams] == [1, 2]
    assert _short(records) == ["stream 1 priority 0", "stream 2 priority -1"]


def test_streams_are_equal_to_themselves_alone(records: Records) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    assert first == first
    assert first != second
    assert len({first, second, first}) == 2


def test_wait_names_the_record_that_was_newest_when_it_was_called(records: Records) -> None:
    """An event that is recorded again keeps the earlier wait's meaning."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    records.clear()
    event.record(producer)
    consumer.wait_event(event)
    event.record(producer)
    event.wait(consumer)
    first, second = records[0]["seq"], records[2]["seq"]
    assert _short(records) == [
        f"@{first} record e0 on 1",
        f"wait 2 for e0@{first}",
        f"@{second} record e0 on 1",
        f"wait 2 for e0@{second}",
    ]


def test_wait_for_an_event_that_was_never_recorded_has_no_record(records: Records) -> None:
    """It waits for nothing, as on a GPU; a check may judge it."""
    torch.cuda.current_stream().wait_event(torch.cuda.Event())
    assert _short(records) == ["wait 0 for e0@None"]


def test_record_without_a_stream_marks_the_current_one(records: Records) -> None:
    side = torch.cuda.Stream()
    records.clear()
    with torch.cuda.stream(side):
        torch.cuda.Event().record()
    torch.cuda.Event().record()
    assert [(r["op"], r["stream"]) for r in records] == [("event_record", 1), ("event_record", 0)]


def test_record_event_makes_an_event_when_it_gets_none(records: Records) -> None:
    event = torch.cuda.current_stream().record_event()
    assert torch.cuda.current_stream().record_event(event) is event
    assert [record["event"] for record in records] == [0, 0]


def test_wait_stream_waits_for_all_of_the_other(records: Records) -> None:
    side = torch.cuda.Stream()
    records.clear()
    side.wait_stream(torch.cuda.default_stream())
    assert _short(records) == ["wait 1 for stream 0"]


def test_synchronize_makes_the_host_wait(records: Records) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    records.clear()
    event.record(side)
    event.synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    recorded = records[0]["seq"]
    assert _short(records[1:]) == [
        f"host waits for event {recorded}",
        "host waits for stream 1",
        "host waits for device None",
    ]


def test_stream_blocks_nest_and_end_in_order(records: Records) -> None:
    default = torch.cuda.current_stream()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    current = []
    with torch.cuda.stream(first):
        with torch.cuda.stream(second):
            current.append(torch.cuda.current_stream())
        with torch.cuda.stream(None):
            current.append(torch.cuda.current_stream())
    current.append(torch.cuda.current_stream())
    assert current == [second, first, default]


def test_stream_block_ends_with_an_error_inside(records: Records) -> None:
    default = torch.cuda.current_stream()
    with pytest.raises(ValueError, match="inside"), torch.cuda.stream(torch.cuda.Stream()):
        raise ValueError("inside")
    assert torch.cuda.current_stream() == default


def test_stream_context_can_be_used_again(records: Records) -> None:
    side = torch.cuda.Stream()
    context = torch.cuda.stream(side)
    for _ in range(2):
        with context:
            assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_nvtx_ranges_are_seen_in_every_form(records: Records) -> None:
    assert torch.cuda.nvtx.range_push("outer") == 0
    with torch.cuda.nvtx.range("layer {}", 3):
        pass
    assert torch.cuda.nvtx.range_pop() == 0
    assert _short(records) == ["push outer", "push layer 3", "pop", "pop"]


@pytest.mark.parametrize("keyword", ["interprocess", "external"])
def test_events_of_other_kinds_are_refused(records: Records, keyword: str) -> None:
    with pytest.raises(NotImplementedError, match="interprocess"):
        torch.cuda.Event(**{keyword: True})


def test_elapsed_time_is_refused(records: Records) -> None:
    """The fake runtime has an order and no clock."""
    start = torch.cuda.Event(enable_timing=True)
    with pytest.raises(NotImplementedError, match="no clock"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))
