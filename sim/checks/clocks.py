"""Happens-before between streams: what each stream is known to have waited for.

A stream is in order. It learns of another stream's work by waiting for an event or for the stream,
or through the host, when the host has waited for that work before launching more. The clock of a
stream says, for every stream, up to which record that stream's work is finished when its next
operation starts.
"""

from __future__ import annotations

from real.trace import OpKind
from real.trace.recorder import Record


class StreamClocks:
    """The clocks of one rank, advanced record by record."""

    def __init__(self) -> None:
        self._clocks: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}
        self._events: dict[int, dict[int, int]] = {}
        self._collectives: dict[tuple[str, int], dict[int, int]] = {}

    def clock(self, stream: int) -> dict[int, int]:
        """Returns a stream's clock, by stream; the caller does not change it."""
        clock = self._clocks.get(stream)
        if clock is None:
            clock = self._clocks[stream] = dict(self._host)
        return clock

    def is_ordered_after(self, stream: int, other: int, seq: int) -> bool:
        """Whether the next operation of `stream` starts after operation `seq` of `other`."""
        return stream == other or self.clock(stream).get(other, -1) >= seq

    def advance(self, record: Record) -> None:
        """Takes a record into account; call it for every record, after judging the record."""
        op, seq = record["op"], record["seq"]
        if op in (OpKind.KERNEL, OpKind.RESIZE, OpKind.ALLOCATE):
            self.clock(record["stream"])[record["stream"]] = seq
        elif op == OpKind.COLLECTIVE:
            stream = record["stream"]
            self.clock(stream)[stream] = seq
            self._collectives[record["group"], record["n"]] = dict(self.clock(stream))
        elif op == OpKind.COLLECTIVE_WAIT:
            # Joins nothing new on the issuing stream; another stream joins it like an event.
            _join(self.clock(record["stream"]), self._collectives[record["group"], record["n"]])
        elif op == OpKind.EVENT_RECORD:
            stream = record["stream"]
            self._events[seq] = {**self.clock(stream), stream: seq}
        elif op == OpKind.EVENT_WAIT:
            if record["record"] is not None:
                _join(self.clock(record["stream"]), self._events[record["record"]])
        elif op == OpKind.STREAM_WAIT:
            waited = {**self.clock(record["on"]), record["on"]: seq}
            _join(self.clock(record["stream"]), waited)
        elif op == OpKind.HOST_SYNC:
            self._host_sync(record)

    def _host_sync(self, record: Record) -> None:
        if record["what"] == "device":
            for stream, clock in self._clocks.items():
                _join(self._host, {**clock, stream: record["seq"]})
        elif record["what"] == "stream":
            _join(self._host, {**self.clock(record["on"]), record["on"]: record["seq"]})
        elif record["on"] is not None:
            _join(self._host, self._events[record["on"]])
        # All that is launched from now on is launched after what the host has waited for.
        for clock in self._clocks.values():
            _join(clock, self._host)


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, seq in other.items():
        if clock.get(stream, -1) < seq:
            clock[stream] = seq
