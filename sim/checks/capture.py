"""I19: what a CUDA graph capture may not do.

A stream takes part in a capture when it is the one that the capture began on, or waits for one that
takes part. Inside, nothing may wait for what was recorded outside or be waited for by the host;
memory comes from the graph's pool, so only streams that take part allocate; each of them is joined
by the first one before the end; and gradients stay where they are, since a replay writes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import Named, UnitKey, named_of
from real.trace.recorder import Record
from sim.checks.base import Access, Reporter, Violation
from sim.checks.clocks import StreamClocks
from sim.checks.rules import Judges, records_of

JUDGES: Final = (Judges("I19", (records_of(OpKind.CAPTURE),)),)


def check_capture(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's captures."""
    return [
        violation
        for trace in traces
        if any(record["op"] == OpKind.CAPTURE for record in trace.lean_records)
        for violation in _Checker(trace).run()
    ]


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reporter = Reporter(trace)
        self._clocks = StreamClocks()
        self._begin: Record | None = None
        # Streams that take part, with their newest record inside.
        self._captured: dict[int, Record] = {}
        self._captured_events: set[int] = set()
        self._names: dict[Named, set[int]] = {}

    def run(self) -> list[Violation]:
        for record in self._trace.records:
            op = record["op"]
            if op == OpKind.CAPTURE:
                self._border(record)
            elif self._begin is not None:
                self._inside(record)
            if op == OpKind.NAME:
                self._names.setdefault(named_of(record), set()).add(record["storage"])
            self._clocks.advance(record)
        if self._begin is not None and self._trace.is_complete:
            self._report("The capture never ends.", self._begin)
        return self._reporter.found

    def _border(self, record: Record) -> None:
        stream = record["stream"]
        if record["event"] == "begin":
            if self._begin is not None:
                self._report("A capture begins inside another one.", record)
            self._begin = record
            self._captured = {stream: record}
            self._captured_events = set()
            return
        for other, last in self._captured.items():
            if not self._clocks.is_ordered_after(stream, other, last["seq"]):
                self._report(
                    f"{self._label(other)} is not joined before the capture ends.",
                    record,
                    first=self._reporter.access(last["seq"], other, last["op"]),
                    missing=f"{self._label(stream)} never waits for {self._label(other)} after "
                    f"record {last['seq']}",
                )
        self._begin = None

    def _inside(self, record: Record) -> None:
        op = record["op"]
        if op in (OpKind.ALLOCATE, OpKind.RESIZE) and record["bytes"] > 0:
            if record["stream"] not in self._captured:
                self._report(
                    f"{record['bytes']} bytes are allocated outside the graph's pool: "
                    f"{self._label(record['stream'])} takes no part in the capture.",
                    record,
                )
        elif op == OpKind.EVENT_WAIT:
            self._wait_event(record)
        elif op == OpKind.STREAM_WAIT:
            self._wait_stream(record)
        elif op == OpKind.HOST_SYNC:
            if record["what"] == "device" or record["on"] in self._captured:
                self._report("The host waits for work that is only being captured.", record)
        elif op == OpKind.NAME:
            named = named_of(record)
            known = self._names.get(named, set())
            if "gradient" in named.kind and known and record["storage"] not in known:
                self._report(
                    "A gradient is bound to new memory inside the capture: replays write there and "
                    "the optimizer reads elsewhere.",
                    record,
                    unit=named.unit,
                )
        stream = record.get("stream")
        if stream in self._captured and op not in (OpKind.EVENT_WAIT, OpKind.STREAM_WAIT):
            self._captured[stream] = record
            if op == OpKind.EVENT_RECORD:
                self._captured_events.add(record["seq"])

    def _wait_event(self, record: Record) -> None:
        stream, waited = record["stream"], record["record"]
        if waited in self._captured_events:
            self._captured[stream] = record
        elif stream in self._captured and waited is not None:
            self._report(
                f"{self._label(stream)} waits for an event that was recorded outside the capture, "
                f"in record {waited}.",
                record,
            )

    def _wait_stream(self, record: Record) -> None:
        stream, other = record["stream"], record["on"]
        if other in self._captured:
            self._captured[stream] = record
        elif stream in self._captured:
            self._report(
                f"{self._label(stream)} waits for {self._label(other)}, which takes no part in the "
                "capture.",
                record,
            )

    def _label(self, stream: int) -> str:
        label = self._reporter.stream(stream)
        return label[0].upper() + label[1:]

    def _report(
        self,
        message: str,
        record: Record,
        *,
        unit: UnitKey | None = None,
        first: Access | None = None,
        missing: str | None = None,
    ) -> None:
        self._reporter.report(
            "I19", message, unit=unit, seq=record["seq"], first=first, missing=missing
        )
