"""I1 without kernels: who uses a unit has waited for its gather.

A hook says that its module is about to read the unit's weights, so by the time the next hook runs
or the node ends, the stream that the unit is used on must be ordered after the unit's newest
gather. Traces of a GPU run have no kernels of Transformer Engine, so there this is what shows a
lost wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.clocks import StreamClocks
from sim.checks.rules import GATHERS, Judges, records_of

_USES: Final = frozenset({"pre_forward", "pre_backward"})
_ENDS: Final = frozenset({OpKind.HOOK, OpKind.NODE, OpKind.NODE_END, OpKind.STEP})


class _Gather(NamedTuple):
    """The newest gather of a unit and where it runs."""

    record: Record
    stream: int


JUDGES: Final = (Judges("I1", (records_of(OpKind.HOOK), records_of(OpKind.UNSHARD), GATHERS)),)


def check_uses(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's uses of units; reports each unit once a stream."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reporter = Reporter(trace)
        self._clocks = StreamClocks()
        self._gathers: dict[UnitKey, _Gather] = {}
        self._reported: set[tuple[UnitKey, int]] = set()

    def run(self) -> list[Violation]:
        hook: Record | None = None
        use: Record | None = None
        for record in self._trace.lean_records:
            op = record["op"]
            if op in _ENDS:
                if use is not None:
                    self._judge(use)
                hook, use = None, None
            if op == OpKind.HOOK and record["point"] in _USES:
                hook = record
            elif op == OpKind.UNSHARD and hook is not None and unit_key(record) == unit_key(hook):
                use = record  # others that follow the same hook are gathered ahead of their use
            elif op == OpKind.COLLECTIVE:
                if record["kind"] == "all_gather" and record["unit"] is not None:
                    stream = self._clocks.stream_of(record)
                    self._gathers[unit_key(record)] = _Gather(record, stream)
            self._clocks.advance(record)
        return self._reporter.found

    def _judge(self, use: Record) -> None:
        unit, stream = unit_key(use), use["stream"]
        gather = self._gathers.get(unit)
        if gather is None or (unit, stream) in self._reported:
            return
        seq = gather.record["seq"]
        if self._clocks.is_ordered_after(stream, gather.stream, seq):
            return
        self._reported.add((unit, stream))
        group = self._clocks.communicator(gather.stream)
        on = self._reporter.stream(gather.stream) if group is None else f"the stream of {group}"
        self._reporter.report(
            "I1",
            f"Unit {unit} is used in no order with its gather.",
            unit=unit,
            first=self._reporter.access(seq, gather.stream, f"all_gather of {unit} writes", on),
            second=self._reporter.access(use["seq"], stream, "use"),
            missing=f"{self._reporter.stream(stream)} never waits for all_gather of {unit} on "
            f"{on} in record {seq}",
        )
