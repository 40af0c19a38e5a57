"""I13: gradients of all microbatches of a step are added up, also in a group of one rank.

Looks at what writes to a unit's main gradient. The first reduction of a step may overwrite it; a
later one has to add. A first one that adds needs a gradient that was cleared since the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation, unit_label
from sim.checks.rules import Judges, named, records_of

_KIND: Final = "main gradient"
_CLEARS: Final = frozenset({"zero_", "_foreach_zero_", "fill_"})
_OVERWRITES: Final = frozenset({"copy_", "_foreach_copy_", *_CLEARS})
_BORDERS: Final = frozenset(
    {OpKind.NAME, OpKind.REDUCE, OpKind.OPTIMIZER_STEP, OpKind.STEP, OpKind.GRAD_READ}
)
_ADDS: Final = frozenset({"add_", "_foreach_add_"})

JUDGES: Final = (
    Judges("I13", (records_of(OpKind.KERNEL), named(_KIND), records_of(OpKind.REDUCE))),
)


def check_accumulation(traces: Sequence[Trace]) -> list[Violation]:
    """Checks the writes to every rank's main gradients."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


@dataclass
class _Gradient:
    """One main gradient buffer.

    Attributes:
        unit: Its unit.
        reduction: Number of the reduction that wrote it last in this step, or None before.
        is_stale: Holds the gradient of a step whose optimizer step is over.
    """

    unit: UnitKey
    reduction: int | None = None
    is_stale: bool = False


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reporter = Reporter(trace)
        self._gradients: dict[int, _Gradient] = {}
        self._num_reductions: dict[UnitKey, int] = {}
        self._reported: set[UnitKey] = set()

    def run(self) -> list[Violation]:
        gradients = self._gradients
        for record in self._relevant():
            op = record["op"]
            if op in (OpKind.KERNEL, OpKind.COLLECTIVE):
                for number in record["writes"]:
                    if number in gradients:
                        self._write(record, gradients[number], number)
            elif op == OpKind.NAME:
                if record["kind"] == _KIND:
                    gradients[record["storage"]] = _Gradient(unit_key(record))
            elif op == OpKind.REDUCE:
                unit = unit_key(record)
                self._num_reductions[unit] = self._num_reductions.get(unit, 0) + 1
            elif op == OpKind.OPTIMIZER_STEP or (op == OpKind.STEP and record["event"] == "begin"):
                for gradient in gradients.values():
                    gradient.is_stale |= gradient.reduction is not None
                    gradient.reduction = None
            elif op == OpKind.GRAD_READ:
                for gradient in gradients.values():
                    gradient.is_stale |= gradient.reduction is not None
        return self._reporter.found

    def _relevant(self) -> list[Record]:
        """Returns the writes to main gradients, and what says when they happen."""
        numbers = {
            record["storage"]
            for record in self._trace.lean_records
            if record["op"] == OpKind.NAME and record["kind"] == _KIND
        }
        if not numbers:
            return []
        return [
            record
            for record in self._trace.records
            if record["op"] in _BORDERS or not numbers.isdisjoint(record.get("writes", ()))
        ]

    def _write(self, record: Record, gradient: _Gradient, number: int) -> None:
        is_collective = record["op"] == OpKind.COLLECTIVE
        name = record["kind"] if is_collective else record["name"]
        reduction = self._num_reductions.get(gradient.unit, 0)
        overwrites = name in _OVERWRITES or (is_collective and number not in record["reads"])
        if overwrites:
            if gradient.reduction not in (None, reduction) and not gradient.is_stale:
                self._report(
                    gradient,
                    record,
                    f"{name} overwrites the gradient of unit {unit_label(gradient.unit)} that "
                    "an earlier microbatch of the step left there.",
                )
            gradient.is_stale = False
        elif name in _ADDS and gradient.is_stale and gradient.reduction is None:
            self._report(
                gradient,
                record,
                f"{name} adds to the gradient of unit {unit_label(gradient.unit)} that the step "
                "before left there.",
            )
        gradient.reduction = None if name in _CLEARS else reduction

    def _report(self, gradient: _Gradient, record: Record, message: str) -> None:
        if gradient.unit in self._reported:
            return
        self._reported.add(gradient.unit)
        self._reporter.report(
            "I13",
            message,
            unit=gradient.unit,
            second=self._reporter.access(record["seq"], record["stream"], message.split()[0]),
        )
