"""I18: phases of units follow the table, releases come at rest, profiler ranges are balanced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.rules import Judges, records_of

LEGAL: Final = frozenset(
    {
        ("resting", "use in forward", "forward"),
        ("resting", "use in backward", "backward"),
        ("forward", "use in backward", "forward and backward"),
        ("forward", "release after forward", "resting"),
        ("backward", "use in forward", "forward and backward"),
        ("backward", "end of backward", "resting"),
        ("forward and backward", "release after forward", "backward"),
        ("forward and backward", "end of backward", "forward"),
    }
)
"""Every change of phase that there is, said here again so that a fault in the hooks' own table
(real.hooks.lifecycle) shows."""


_JUDGED: Final = frozenset(
    {
        OpKind.PHASE,
        OpKind.RESHARD,
        OpKind.INSTALL,
        OpKind.NVTX_PUSH,
        OpKind.NVTX_POP,
        OpKind.STEP,
    }
)

JUDGES: Final = (
    Judges("I18", (records_of(OpKind.PHASE),)),
    Judges("I18", (records_of(OpKind.NVTX_PUSH),), is_whole=False),
)


def check_phases(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's phases and profiler ranges."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._records = [record for record in trace.lean_records if record["op"] in _JUDGED]
        self._reporter = Reporter(trace)
        self._phases: dict[UnitKey, str] = {}
        self._depth = 0

    def run(self) -> list[Violation]:
        for record in self._records:
            op = record["op"]
            if op == OpKind.PHASE:
                self._change(record)
            elif op == OpKind.RESHARD:
                self._release(record)
            elif op == OpKind.INSTALL:
                self._phases.clear()
            elif op == OpKind.NVTX_PUSH:
                self._depth += 1
            elif op == OpKind.NVTX_POP:
                self._pop(record)
            elif op == OpKind.STEP:
                self._border(record)
        return self._reporter.found

    def _change(self, record: Record) -> None:
        unit, before, after = unit_key(record), record["before"], record["after"]
        known = self._phases.get(unit, "resting")
        if before != known:
            self._report(
                f"Unit {unit} is said to change from phase '{before}', and is in '{known}'.",
                record,
            )
        if (before, record["event"], after) not in LEGAL:
            self._report(
                f"Unit {unit} goes from phase '{before}' to '{after}' by '{record['event']}': "
                "no legal step.",
                record,
            )
        self._phases[unit] = after

    def _release(self, record: Record) -> None:
        unit = unit_key(record)
        phase = self._phases.get(unit, "resting")
        if phase != "resting":
            self._report(f"Unit {unit} is released in phase '{phase}'.", record)

    def _pop(self, record: Record) -> None:
        self._depth -= 1
        if self._depth < 0:
            self._report("A profiler range is closed that was not opened.", record)
            self._depth = 0

    def _border(self, record: Record) -> None:
        if self._depth:
            self._report(f"{self._depth} profiler ranges are open at the end of a step.", record)
            self._depth = 0
        for unit, phase in sorted(self._phases.items()):
            if phase != "resting":
                self._report(
                    f"Unit {unit} is in phase '{phase}' at the end of a step.",
                    record,
                    unit,
                )
        self._phases.clear()

    def _report(self, message: str, record: Record, unit: UnitKey | None = None) -> None:
        if unit is None and "unit" in record:
            unit = unit_key(record)
        self._reporter.report("I18", message, unit=unit, seq=record["seq"])
