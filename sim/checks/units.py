"""The life of FSDP units: gathered once, released once, few at the same time, all at rest at last.

Covers I1 (taken as unsharded), I2, I3, I9 (weights held over the optimizer's step) and, in units,
I20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import Place, UnitKey, bound, only, unit_key, walk
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.rules import BOUND, Judges, records_of

MOST_UNSHARDED: Final = {"none": 3, "forward": 4, "both": 5}
"""Units unsharded at the same time under combined 1F1B, by prefetch policy.

One more for each of: a frozen unit (kept until its layer's last backward node), a recomputed
layernorm and a dense layer (both have a layer gathered from its mlp node's backward on).
"""


_JUDGED: Final = frozenset(
    {OpKind.UNIT, OpKind.UNSHARD, OpKind.RESHARD, OpKind.REDUCE, OpKind.OPTIMIZER_STEP}
)

_UNSHARDS: Final = (records_of(OpKind.UNSHARD), records_of(OpKind.RESHARD))
JUDGES: Final = (
    Judges("I1", _UNSHARDS, is_whole=False),
    Judges("I2", _UNSHARDS),
    Judges("I3", (*_UNSHARDS, records_of(OpKind.STEP))),
    Judges("I9", (*_UNSHARDS, records_of(OpKind.OPTIMIZER_STEP)), is_whole=False),
    Judges("I20", (*_UNSHARDS, BOUND)),
)


def check_units(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's units."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


def most_unsharded(trace: Trace) -> int | None:
    """Returns how many units may be unsharded at once, or None where nobody says.

    The target says it in the header; for our hooks it is the bound of their policy.
    """
    declared = bound(trace, "unsharded")
    if declared is not None or not is_ours(trace):
        return declared
    scenario = trace.scenario
    if not scenario.get("overlap_moe_expert_parallel_comm", False):
        return None
    most = MOST_UNSHARDED.get(scenario.get("prefetch", ""))
    if most is None:
        return None
    is_recomputed = scenario.get("recompute_granularity") == "selective"
    most += is_recomputed and "layernorm" in str(scenario.get("recompute_modules"))
    most += "0" in str(scenario.get("moe_layer_freq"))
    has_frozen = any(r["op"] == OpKind.UNIT and r["trainable"] == 0 for r in trace.lean_records)
    return most + has_frozen


def is_ours(trace: Trace) -> bool:
    """Whether our hooks drove the model, whose policy the checks know."""
    return str(trace.header.get("target", "mfsdp2")) == "mfsdp2"


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._records = only(trace, _JUDGED)
        self._reporter = Reporter(trace)
        self._unsharded: set[UnitKey] = set()
        self._frozen: set[UnitKey] = set()
        self._gathers: dict[UnitKey, Record] = {}
        # The gather of each unit whose weights the newest optimizer step has made old.
        self._old: dict[UnitKey, Record] = {}
        self._optimizer: Record | None = None
        self._bound = most_unsharded(trace)
        self._reduced_unsharded: set[UnitKey] = set()

    def run(self) -> list[Violation]:
        for record, place in walk(self._records):
            op = record["op"]
            if op == OpKind.UNSHARD:
                self._unshard(record)
            elif op == OpKind.RESHARD:
                self._reshard(record, place)
            elif op == OpKind.REDUCE:
                if unit_key(record) in self._unsharded:
                    self._reduced_unsharded.add(unit_key(record))
            elif op == OpKind.UNIT:
                if record["trainable"] == 0:
                    self._frozen.add(unit_key(record))
            elif op == OpKind.OPTIMIZER_STEP:
                self._optimizer = record
                still_there = (self._unsharded | self._old.keys()) - self._frozen
                self._old = {unit: self._gathers[unit] for unit in still_there}
            elif op == OpKind.STEP:
                for unit in sorted(self._unsharded):
                    self._report(
                        "I3", f"Unit {unit} is unsharded at the end of a step.", record, unit
                    )
                self._unsharded.clear()
        return self._reporter.found

    def _unshard(self, record: Record) -> None:
        unit = unit_key(record)
        if record["gathered"] and unit in self._unsharded:
            self._report("I2", f"Unit {unit} is gathered while it is unsharded.", record, unit)
        if record["gathered"] or unit not in self._gathers:
            self._gathers[unit] = record
            self._old.pop(unit, None)
        elif unit in self._old:
            self._use_of_old(unit, record)
        elif unit not in self._unsharded:
            self._report("I1", f"Unit {unit} is taken as unsharded and is not.", record, unit)
        self._unsharded.add(unit)
        if self._bound is not None and len(self._unsharded) > self._bound:
            names = ", ".join(str(name) for name in sorted(self._unsharded))
            self._report(
                "I20", f"Expected at most {self._bound} units unsharded, got {names}.", record, unit
            )
            self._bound = None  # once a run: the rest follows from it

    def _use_of_old(self, unit: UnitKey, use: Record) -> None:
        assert self._optimizer is not None
        gather = self._old.pop(unit)  # once a step
        self._reporter.report(
            "I9",
            f"Unit {unit} is used with weights that were gathered before the optimizer's step.",
            unit=unit,
            first=self._reporter.access(gather["seq"], gather["stream"], "gather"),
            second=self._reporter.access(use["seq"], use["stream"], "use"),
            missing=f"no gather of {unit} after the optimizer step in record "
            f"{self._optimizer['seq']}",
        )

    def _reshard(self, record: Record, place: Place) -> None:
        unit = unit_key(record)
        if unit not in self._unsharded:
            self._report("I3", f"Unit {unit} is released and was not gathered.", record, unit)
        self._unsharded.discard(unit)
        self._old.pop(unit, None)
        if unit in self._reduced_unsharded and str(place.hook).startswith("post_gradient"):
            self._report(
                "I20",
                f"Unit {unit} is released after its gradient buffer was allocated.",
                record,
                unit,
            )
        self._reduced_unsharded.discard(unit)

    def _report(self, rule: str, message: str, record: Record, unit: UnitKey) -> None:
        self._reporter.report(rule, message, unit=unit, seq=record["seq"])
