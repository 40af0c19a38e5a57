"""Around the optimizer: gradients are read after their reductions, weights gathered after it.

Covers I8 (clip, norm and optimizer come after the last reduction, and no reduction comes after
them) and I9 (the first gather of a step comes after the optimizer's write).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, named_storages, stream_roles, unit_key
from real.trace.recorder import Record
from sim.checks.base import Access, Reporter, Violation
from sim.checks.clocks import StreamClocks
from sim.checks.rules import GATHERS, REDUCTIONS, Judges, records_of

_CONSUMERS: Final = (OpKind.OPTIMIZER_STEP, OpKind.GRAD_READ)
_REDUCTIONS: Final = ("reduce_scatter", "all_reduce")
_WEIGHTS: Final = ("main weight", "model weight")

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
        # By which record of which stream the optimizer has written all weights.
        self._written: dict[int, int] = {}
        self._writes = _weight_writes(trace)
        self._joins = _side_joins(trace)
        self._refreshes = _refreshes(trace)
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
        elif self._optimizer is not None and self._consumer is self._optimizer:
            self._written = self._written_by(self._optimizer, record["seq"])

    def _written_by(self, optimizer: Record, end: int) -> dict[int, int]:
        """Returns the last record of each stream on which an optimizer step writes weights.

        Its own record is only where it begins, and the host may look at values inside of it. So it
        is dated by the kernels that write weights; without kernels by the last refresh on a stream
        of its own, which it forks and joins, else by the end of the step, and on a side stream by
        where the compute stream joins it.
        """
        seq = optimizer["seq"]
        writes = self._writes.get(seq) or self._refreshes.get(seq)
        return writes or {optimizer["stream"]: self._joins.get(seq, end)}

    def _gather(self, record: Record) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        stream = self._clocks.stream_of(record)
        late = [
            (other, seq)
            for other, seq in self._written.items()
            if not self._clocks.is_ordered_after(stream, other, seq)
        ]
        if not late:
            return
        self._optimizer = None  # once: all gathers that follow have the same fault
        [(other, seq), *_] = late
        if other == optimizer["stream"]:
            seq = optimizer["seq"]  # the step is known by where it begins
        unit = unit_key(record)
        self._reporter.report(
            "I9",
            f"Unit {unit} is gathered in no order with the optimizer's write of its weights.",
            unit=unit,
            first=self._reporter.access(seq, other, "optimizer writes"),
            second=self._access(record, stream, "reads"),
            missing=f"{self._label(stream)} never waits for the optimizer step on "
            f"{self._label(other)} in record {seq}",
        )

    def _consume(self, record: Record) -> None:
        self._consumer = record
        if record["op"] == OpKind.OPTIMIZER_STEP:
            self._optimizer = record
            self._written = {record["stream"]: record["seq"]}
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


def _windows(trace: Trace) -> Iterator[tuple[Record, list[Record]]]:
    """Yields each optimizer step with the records from it to the border of its step."""
    if not trace.records:
        return
    offset = trace.records[0]["seq"]
    optimizer: Record | None = None
    for record in trace.lean_records:
        if record["op"] == OpKind.OPTIMIZER_STEP:
            optimizer = record
        elif record["op"] == OpKind.STEP and optimizer is not None:
            yield optimizer, trace.records[optimizer["seq"] - offset : record["seq"] - offset]
            optimizer = None


def _weight_writes(trace: Trace) -> dict[int, dict[int, int]]:
    """Returns the last kernel of each stream that writes weights, by optimizer step.

    Weights are what is named so, and what gathers of units read.
    """
    weights = {number for number, held in named_storages(trace).items() if held.kind in _WEIGHTS}
    for record in trace.lean_records:
        if record["op"] == OpKind.COLLECTIVE and record["kind"] == "all_gather":
            if record["unit"] is not None:
                weights.update(record["reads"])
    return {
        optimizer["seq"]: {
            record["stream"]: record["seq"]
            for record in inside
            if record["op"] == OpKind.KERNEL and not weights.isdisjoint(record["writes"])
        }
        for optimizer, inside in _windows(trace)
    }


def _side_joins(trace: Trace) -> dict[int, int]:
    """Returns the last point of a side stream that the compute stream joins, by optimizer step."""
    compute = [stream for stream, role in stream_roles(trace).items() if role == "compute"]
    joins: dict[int, int] = {}
    for optimizer, inside in _windows(trace) if compute else ():
        side = optimizer["stream"]
        events = {
            r["seq"] for r in inside if r["op"] == OpKind.EVENT_RECORD and r["stream"] == side
        }
        for record in inside if side not in compute else ():
            if record.get("stream") not in compute:
                continue
            if record["op"] == OpKind.EVENT_WAIT and record["record"] in events:
                joins[optimizer["seq"]] = record["record"]
            elif record["op"] == OpKind.STREAM_WAIT and record["on"] == side:
                joins[optimizer["seq"]] = record["seq"]
    return joins


def _refreshes(trace: Trace) -> dict[int, dict[int, int]]:
    """Returns the last fork of a stream of gathers that the optimizer joins, by optimizer step.

    A tree may cast its weights on the stream that gathers them: what comes after on that stream
    sees them, and what the step does at last has nothing to do with them.
    """
    gathering = {
        record["stream"]
        for record in trace.lean_records
        if record["op"] == OpKind.COLLECTIVE and record["kind"] == "all_gather"
        if record["unit"] is not None and not record["async"]
    }
    found: dict[int, dict[int, int]] = {}
    for optimizer, inside in _windows(trace):
        main = optimizer["stream"]
        waits = [record for record in inside if record["op"] == OpKind.STREAM_WAIT]
        for fork in waits:
            is_fork = fork["on"] == main and fork["stream"] in gathering - {main}
            if is_fork and any(
                join["seq"] > fork["seq"]
                and join["on"] == fork["stream"]
                and join["stream"] == main
                for join in waits
            ):
                found[optimizer["seq"]] = {main: fork["seq"], fork["stream"]: waits[-1]["seq"]}
    return found
