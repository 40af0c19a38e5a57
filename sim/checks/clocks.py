"""Happens-before between streams: what each stream is known to have waited for.

A stream is in order. It learns of another stream's work by waiting for an event or for the stream,
or through the host, when the host has waited for that work before launching more. The clock of a
stream says, for every stream, up to which record that stream's work is finished when its next
operation starts.

[Note: the stream of a collective]
As torch does it since 2.8, a synchronous collective runs on the stream that issues it. One with
`async_op=True`, and every message, runs on a stream of the communicator's own: that stream waits
for the issuing one, and whoever wants the result waits for the work. Here such a stream has a
negative number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from real.trace import OpKind, TraceError
from real.trace.recorder import Record

Clock = dict[int, int]


ORDERING: Final = frozenset(
    {
        OpKind.COLLECTIVE,
        OpKind.COLLECTIVE_WAIT,
        OpKind.EVENT_RECORD,
        OpKind.EVENT_WAIT,
        OpKind.STREAM_WAIT,
        OpKind.HOST_SYNC,
    }
)
"""Records that change what a stream has waited for."""


class CallKey(NamedTuple):
    """What tells a collective or a message of one rank from all others.

    Attributes:
        group: The communicator.
        n: The number of the call.
        kind: "send" or "recv" for a message, whose number counts its pair and direction.
        peer: The other rank of a message.
    """

    group: str
    n: int
    kind: str | None
    peer: int | None


def call_key(record: Record) -> CallKey:
    """Returns the key of a collective, or of a wait for one."""
    peer = record.get("peer")
    kind = record.get("kind") if peer is not None else None
    return CallKey(record["group"], record["n"], kind, peer)


class StreamClocks:
    """The clocks of one rank, advanced record by record."""

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._events: dict[int, Clock] = {}
        self._calls: dict[CallKey, Clock] = {}
        self._communicators: dict[tuple[str, int | None], int] = {}
        self._groups: list[str] = []
        self._device_sync = -1

    def clock(self, stream: int) -> Clock:
        """Returns a stream's clock, by stream; the caller does not change it."""
        clock = self._clocks.get(stream)
        if clock is None:
            clock = self._clocks[stream] = dict(self._host)
        return clock

    def is_ordered_after(self, stream: int, other: int, seq: int) -> bool:
        """Whether the next operation of `stream` starts after operation `seq` of `other`."""
        return (
            stream == other or seq <= self._device_sync or self.clock(stream).get(other, -1) >= seq
        )

    def stream_of(self, call: Record) -> int:
        """Returns where a collective runs [Note: the stream of a collective].

        Call it before judging the collective: a communicator's stream joins the issuing one here.
        """
        issuing: int = call["stream"]
        if not call["async"]:
            return issuing
        key = (call["group"], call.get("peer"))
        own = self._communicators.get(key)
        if own is None:
            self._groups.append(call["group"])
            own = self._communicators[key] = -len(self._groups)
        _join(self.clock(own), self.clock(issuing))
        _join(self.clock(own), {issuing: call["seq"]})
        return own

    def communicator(self, stream: int) -> str | None:
        """Returns the group that a negative stream is of, None for other streams."""
        return self._groups[-stream - 1] if stream < 0 else None

    def advance(self, record: Record) -> None:
        """Takes a record into account, after it was judged. Kernels and allocations need none."""
        op, seq = record["op"], record["seq"]
        if op not in ORDERING:
            return
        if op == OpKind.COLLECTIVE:
            stream = self.stream_of(record)
            self._calls[call_key(record)] = {**self.clock(stream), stream: seq}
            if record["async"]:
                self.clock(stream)[stream] = seq
        elif op == OpKind.COLLECTIVE_WAIT:
            done = self._calls.get(call_key(record))
            if done is None:
                raise TraceError(
                    f"Expected record {seq} to wait for a collective before it, got number "
                    f"{record['n']} of group {record['group']}, which was not issued."
                )
            _join(self.clock(record["stream"]), done)
        elif op == OpKind.EVENT_RECORD:
            stream = record["stream"]
            self._events[seq] = {**self.clock(stream), stream: seq}
        elif op == OpKind.EVENT_WAIT:
            if record["record"] is not None:
                _join(self.clock(record["stream"]), self._event(record["record"], seq))
        elif op == OpKind.STREAM_WAIT:
            waited = {**self.clock(record["on"]), record["on"]: seq}
            _join(self.clock(record["stream"]), waited)
        elif op == OpKind.HOST_SYNC:
            self._host_sync(record)

    def _event(self, event_record: int, seq: int) -> Clock:
        clock = self._events.get(event_record)
        if clock is None:
            raise TraceError(
                f"Expected record {seq} to wait for the record of an event, got {event_record}, "
                "which is none."
            )
        return clock

    def _host_sync(self, record: Record) -> None:
        if record["what"] == "device":
            self._device_sync = record["seq"]
            return
        if record["what"] == "stream":
            _join(self._host, {**self.clock(record["on"]), record["on"]: record["seq"]})
        elif record["on"] is not None:
            _join(self._host, self._event(record["on"], record["seq"]))
        # All that is launched from now on is launched after what the host has waited for.
        for clock in self._clocks.values():
            _join(clock, self._host)


def _join(clock: Clock, other: Clock) -> None:
    for stream, seq in other.items():
        if clock.get(stream, -1) < seq:
            clock[stream] = seq
