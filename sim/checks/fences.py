"""Around the optimizer: gradients are read after their reductions, weights gathered after it.

Covers I8 (clip, norm and optimizer come after the last reduction, and no reduction comes after
them) and I9 (the first gather of a step comes after the optimizer's write).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Access, Reporter, Violation
from sim.checks.clocks import StreamClocks
from sim.checks.rules import GATHERS, REDUCTIONS, Judges, records_of

_CONSUMERS: Final = (OpKind.OPTIMIZER_STEP, OpKind.GRAD_READ)
_REDUCTIONS: Final = ("reduce_scatter", "all_reduce")

JUDGES: Final = (
    Judges("I8", (REDUCTIONS, records_of(*_CONSUMERS))),
    Judges("I8", (records_of(OpKind.REDUCE), records_of(*_CONSUMERS)), is_whole=False),
    Judges("I9", (records_of(OpKind.OPTIMIZER_STEP), GATHERS)),
)


def check_fences(traces: Sequence[Trace]) -> list[Violation]:
    """Checks the order of every rank's reductions, gradient readers and gathers."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reporter = Reporter(trace)
        self._clocks = StreamClocks()
        # The newest reduction of each unit and stream.
        self._reductions: dict[UnitKey, dict[int, Record]] = {}
        self._optimizer: Record | None = None
        self._written = 0  # by which record the optimizer has written all weights
        self._consumer: Record | None = None

    def run(self) -> list[Violation]:
        for record in self._trace.lean_records:
            op = record["op"]
            if op == OpKind.COLLECTIVE and record["unit"] is not None:
                if record["kind"] in _REDUCTIONS:
                    stream = self._clocks.stream_of(record)
                    self._reductions.setdefault(unit_key(record), {})[stream] = record
                elif record["kind"] == "all_gather":
                    self._gather(record)
            elif op in _CONSUMERS:
                self._consume(record)
            elif op == OpKind.REDUCE and self._consumer is not None:
                self._late(record)
            elif op == OpKind.STEP:
                self._border(record)
            self._clocks.advance(record)
        return self._reporter.found

    def _border(self, record: Record) -> None:
        if record["event"] == "begin":
            self._reductions.clear()
            self._consumer = None
        elif self._consumer is self._optimizer:
            # The optimizer's record is its beginning. The host may look at values inside of it.
            self._written = record["seq"]

    def _gather(self, record: Record) -> None:
        optimizer = self._optimizer
        stream = self._clocks.stream_of(record)
        if optimizer is None or self._clocks.is_ordered_after(
            stream, optimizer["stream"], self._written
        ):
            return
        self._optimizer = None  # once: all gathers that follow have the same fault
        unit = unit_key(record)
        self._reporter.report(
            "I9",
            f"Unit {unit} is gathered in no order with the optimizer's write of its weights.",
            unit=unit,
            first=self._reporter.access(optimizer["seq"], optimizer["stream"], "optimizer writes"),
            second=self._access(record, stream, "reads"),
            missing=f"{self._label(stream)} never waits for the optimizer step on "
            f"{self._label(optimizer['stream'])} in record {optimizer['seq']}",
        )

    def _consume(self, record: Record) -> None:
        self._consumer = record
        if record["op"] == OpKind.OPTIMIZER_STEP:
            self._optimizer, self._written = record, record["seq"]
        reader = "optimizer" if record["op"] == OpKind.OPTIMIZER_STEP else record["by"]
        stream = record["stream"]
        for unit, by_stream in self._reductions.items():
            for other, reduction in by_stream.items():
                if self._clocks.is_ordered_after(stream, other, reduction["seq"]):
                    continue
                self._reporter.report(
                    "I8",
                    f"Gradients of unit {unit} are read in no order with their last reduction.",
                    unit=unit,
                    first=self._access(reduction, other, "writes"),
                    second=self._reporter.access(record["seq"], stream, f"{reader} reads"),
                    missing=f"{self._label(stream)} never waits for "
                    f"{'the work of ' if other < 0 else ''}the {reduction['kind']} of "
                    f"{unit} on {self._label(other)} in record {reduction['seq']}",
                )

    def _late(self, record: Record) -> None:
        consumer = self._consumer
        assert consumer is not None
        self._reporter.report(
            "I8",
            f"Unit {unit_key(record)} is reduced after the gradients of the step were "
            f"read in record {consumer['seq']}.",
            unit=unit_key(record),
            seq=record["seq"],
        )

    def _access(self, record: Record, stream: int, verb: str) -> Access:
        what = f"{record['kind']} of {unit_key(record)} {verb}"
        return self._reporter.access(record["seq"], stream, what, self._label(stream))

    def _label(self, stream: int) -> str:
        group = self._clocks.communicator(stream)
        return self._reporter.stream(stream) if group is None else f"the stream of group {group}"
