"""Notes when the host issued each record, and when the device ran collectives and nodes.

Device times come from CUDA events around the work, on its own stream. They are known when the
device has passed them, so the records of a step are held back until its end; a run that is killed
loses those of the step it was in.

[Note: when a node starts]
A node begins with a wait of its stream for the node before it. The first event is recorded behind
that wait, so the time of the node is its own and not that of what it waited for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from real.trace import OpKind, Sink
from real.trace.recorder import Record

if TYPE_CHECKING:
    from real.gpu.recorder import GpuRecorder

_NS_PER_MS = 1_000_000


class HoldingSink:
    """Keeps records until `flush`, on their way to another sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.held: list[Record] = []

    def write(self, record: Record) -> None:
        """Holds one record."""
        self.held.append(record)

    def flush(self) -> None:
        """Hands on all that is held."""
        for record in self.held:
            self._sink.write(record)
        self.held = []

    def close(self) -> None:
        """Hands on all that is held and closes the other sink."""
        self.flush()
        self._sink.close()


@dataclass(kw_only=True)
class Span:
    """Work of one record on one stream, between two events; None where one is missing."""

    record: Record
    stream: Any = None
    start: Any = None
    end: Any = None


class DeviceTimes:
    """Measures one rank; made when nothing is observed yet.

    Args:
        sink: Holds the records that still wait for their times.
    """

    def __init__(self, sink: HoldingSink) -> None:
        self._sink = sink
        self._began = time.perf_counter_ns()
        self._spans: list[Span] = []
        self._nodes: list[Span] = []
        self._unused: list[Any] = []
        self._base: Any = torch.cuda.Event(enable_timing=True)
        self._rebase()

    def now(self) -> int:
        """Returns nanoseconds since the trace began."""
        return time.perf_counter_ns() - self._began

    def note(self, recorder: GpuRecorder, op: OpKind) -> None:
        """Takes the newest record into account."""
        if op is OpKind.NODE:
            span = Span(record=self._sink.held[-1])
            self._nodes.append(span)
            if span.record["direction"] == "wgrad":  # waits for nothing: its stream has the inputs
                self.waited(recorder, torch.cuda.current_stream())
        elif op is OpKind.NODE_END:
            span = self._nodes.pop()
            if span.start is not None:
                span.end = self._mark(recorder, span.stream)
                self._spans.append(span)
        elif op is OpKind.STEP:
            self.resolve(recorder)

    def waited(self, recorder: GpuRecorder, stream: Any) -> None:
        """A stream was told to wait; a node that began just now starts here."""
        if self._nodes and self._nodes[-1].start is None:
            span = self._nodes[-1]
            span.stream, span.start = stream, self._mark(recorder, stream)

    def begin(self, recorder: GpuRecorder) -> Span:
        """The newest record's work is about to be issued on the current stream."""
        stream = torch.cuda.current_stream()
        record = self._sink.held[-1]
        return Span(record=record, stream=stream, start=self._mark(recorder, stream))

    def end(self, recorder: GpuRecorder, span: Span) -> None:
        """The work has been issued."""
        span.end = self._mark(recorder, span.stream)
        self._spans.append(span)

    def resolve(self, recorder: GpuRecorder) -> None:
        """Waits for the device, fills in the times of all work so far and hands the records on."""
        from real.gpu.recorder import silent

        with silent(recorder):
            torch.cuda.synchronize()
            for span in self._spans:
                for field, event in (("start_ns", span.start), ("end_ns", span.end)):
                    after_base_ms = self._base.elapsed_time(event)
                    span.record[field] = self._base_ns + int(after_base_ms * _NS_PER_MS)
                    self._unused.append(event)
            self._spans = []
            self._sink.flush()
            self._rebase()

    def _rebase(self) -> None:
        # Elapsed time is a float of milliseconds: the nearer the base, the finer.
        self._base.record()
        torch.cuda.synchronize()
        self._base_ns = self.now()

    def _mark(self, recorder: GpuRecorder, stream: Any) -> Any:
        """Records a timing event on a stream, and nothing in the trace."""
        from real.gpu.recorder import silent

        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        with silent(recorder):
            event.record(stream)
        return event
