"""Gradients are complete when their unit is reduced, and every unit is reduced once a microbatch.

Covers I5 (as many gradients as declared), I6 (every gradient is there or filled with zeros), I7 (a
delayed gradient comes from its `backward_dw`, before the reduction) and the counting part of I12.
It judges by what was declared when the hooks were installed; without a declaration only the number
of reductions is judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import Place, UnitKey, bound, only, unit_key, walk
from real.trace.recorder import Record
from real.trace.typed import Reduce, select
from sim.checks.base import Reporter, Violation, unit_label
from sim.checks.rules import COUNTED, SEVERAL_RANKS, Judges, records_of

_JUDGED: Final = frozenset(
    {
        OpKind.PARAMETER,
        OpKind.ZERO_FILL,
        OpKind.REDUCE,
        OpKind.GRADIENTS,
        OpKind.OPTIMIZER_STEP,
    }
)

JUDGES: Final = (
    Judges("I5", (COUNTED, records_of(OpKind.HOOK), records_of(OpKind.REDUCE))),
    Judges("I6", (records_of(OpKind.GRADIENTS),)),
    Judges("I7", (COUNTED, records_of(OpKind.HOOK), records_of(OpKind.REDUCE))),
    Judges("I7", (records_of(OpKind.PARAMETER), records_of(OpKind.GRADIENTS))),
    Judges("I12", (records_of(OpKind.REDUCE), SEVERAL_RANKS), is_whole=False),
)


def check_gradients(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's gradients, and that ranks reduce the same units equally often."""
    found = [violation for trace in traces for violation in _Checker(trace).run()]
    return found + _check_participation(traces)


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._records = only(trace, _JUDGED)
        self._reporter = Reporter(trace)
        declared = bound(trace, "reductions")
        settings = trace.scenario
        self._num_reductions: int | None = (
            settings.get("num_microbatches") if declared is None else declared
        )
        # What was declared, by unit.
        self._declared: dict[UnitKey, dict[UnitKey, int]] = defaultdict(dict)
        self._delayed: set[UnitKey] = set()
        self._has_wgrad_nodes = any(
            r["op"] == OpKind.NODE and r["direction"] == "wgrad" for r in self._records
        )
        # Without hooks that tell, nobody counts what fires.
        self._are_fires_told = any(r["op"] == OpKind.HOOK for r in self._records)
        self._are_reductions_told = self._are_fires_told or any(
            r["op"] == OpKind.REDUCE for r in self._records
        )
        # What happened since the unit's last reduction.
        self._fires: Counter[UnitKey] = Counter()
        self._zero_filled: set[UnitKey] = set()
        self._reductions: Counter[tuple[UnitKey, int | None]] = Counter()
        self._in_step: Counter[UnitKey] = Counter()
        self._is_judged = False

    def run(self) -> list[Violation]:
        for record, place in walk(self._records):
            op = record["op"]
            if op == OpKind.PARAMETER:
                self._declare(record)
            elif op == OpKind.HOOK and record["point"] == "post_gradient":
                self._fire(record, place)
            elif op == OpKind.ZERO_FILL:
                self._zero_filled.add(_parameter(record))
            elif op == OpKind.REDUCE:
                self._reduce(record, place)
            elif op == OpKind.GRADIENTS:
                self._present(record)
            elif op == OpKind.OPTIMIZER_STEP or (op == OpKind.STEP and record["event"] == "end"):
                self._end_step(record)
            elif op == OpKind.STEP:
                self._reductions.clear()
                self._in_step.clear()
                self._is_judged = False
        return self._reporter.found

    def _declare(self, record: Record) -> None:
        if record["unit"] is None:
            return
        unit, parameter = unit_key(record), _parameter(record)
        if record["fires"]:
            self._declared[unit][parameter] = record["fires"]
        if record["delayed"]:
            self._delayed.add(parameter)

    def _fire(self, record: Record, place: Place) -> None:
        unit = unit_key(record)
        parameter = unit.beside(record["module"])
        self._fires[parameter] += 1
        declared = self._declared[unit].get(parameter)
        if declared is not None and self._fires[parameter] == declared + 1:
            self._report(
                "I5",
                f"Expected {declared} gradient(s) of {parameter} a microbatch, got one more before "
                f"unit {unit} was reduced.",
                record,
            )
        if parameter in self._delayed and self._has_wgrad_nodes:
            if not any(" wgrad" in node for node, _ in place.nodes):
                self._report(
                    "I7",
                    f"The delayed gradient of {parameter} is counted outside backward_dw.",
                    record,
                )

    def _reduce(self, record: Record, place: Place) -> None:
        unit = unit_key(record)
        self._reductions[unit, place.microbatch] += 1
        self._in_step[unit] += 1
        # The plain schedule runs no nodes, so no record has a microbatch: judge the step.
        is_in_microbatch = place.microbatch is not None
        allowed = 1 if is_in_microbatch else self._num_reductions
        if allowed and self._reductions[unit, place.microbatch] == allowed + 1:
            how_often = "twice in one" if is_in_microbatch else "more than once a"
            message = f"Unit {unit} is reduced {how_often} microbatch."
            self._report("I5", message, record)
        for parameter, declared in self._declared[unit].items() if self._are_fires_told else ():
            fires = self._fires.pop(parameter, 0)
            if fires < declared and not (fires == 0 and parameter in self._zero_filled):
                rule = "I7" if parameter in self._delayed else "I5"
                self._report(
                    rule,
                    f"Unit {unit} is reduced after {fires} of {declared} gradient(s) "
                    f"of {parameter}.",
                    record,
                )
            self._zero_filled.discard(parameter)

    def _present(self, record: Record) -> None:
        unit = unit_key(record)
        for parameter in map(unit.beside, record["missing"]):
            is_delayed = parameter in self._delayed
            self._report(
                "I7" if is_delayed else "I6",
                f"Unit {unit} is reduced without "
                f"{'the delayed gradient' if is_delayed else 'a gradient'} of {parameter}.",
                record,
            )

    def _end_step(self, record: Record) -> None:
        if self._is_judged or not self._are_reductions_told:
            return
        self._is_judged = True
        for unit, parameters in self._declared.items():
            expected = self._num_reductions
            if parameters and expected is not None and self._in_step[unit] < expected:
                self._report(
                    "I5",
                    f"Unit {unit} is reduced {self._in_step[unit]} times in a step, not "
                    f"{expected}.",
                    record,
                    unit,
                )
            left = [name for name in parameters if self._fires.pop(name, 0)]
            if left:
                self._report(
                    "I5",
                    f"Unit {unit} is not reduced after the last gradients of "
                    f"{', '.join(map(str, left))}: its countdown is held open.",
                    record,
                    unit,
                )

    def _report(self, rule: str, message: str, record: Record, unit: UnitKey | None = None) -> None:
        self._reporter.report(rule, message, unit=unit or unit_key(record), seq=record["seq"])


def _parameter(record: Record) -> UnitKey:
    """Returns a parameter's name in its chunk."""
    return unit_key(record).beside(record["parameter"])


def _check_participation(traces: Sequence[Trace]) -> list[Violation]:
    counts = [
        Counter(unit_key(record) for record in select(trace.lean_records, Reduce))
        for trace in traces
    ]
    found = []
    for trace, count in zip(traces, counts, strict=True):
        for unit in sorted(set(counts[0]) | set(count)):
            fewer = trace if count[unit] < counts[0][unit] else traces[0]
            # A trace that was cut short lacks what the others still did.
            if count[unit] != counts[0][unit] and fewer.is_complete:
                found.append(
                    Violation(
                        rule="I12",
                        rank=trace.rank,
                        message=f"Unit {unit} is reduced {count[unit]} times here and "
                        f"{counts[0][unit]} times on rank {traces[0].rank}.",
                        unit=unit_label(unit),
                    )
                )
    return found
