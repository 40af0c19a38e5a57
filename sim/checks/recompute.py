"""I17: a forward inside autograd is a recomputed one, and changes nothing but its own gather.

It never gathers another unit ahead, never releases, and never opens a forward use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.rules import Judges, records_of

_FORWARD_POINTS: Final = ("pre_forward", "post_forward")
_FORWARD_EVENTS: Final = ("use in forward", "release after forward")
_ENDS_A_HOOK: Final = frozenset(
    {OpKind.HOOK, OpKind.NODE, OpKind.NODE_END, OpKind.STEP, OpKind.FENCE, OpKind.REDUCE}
)

JUDGES: Final = (
    Judges("I17", tuple(map(records_of, (OpKind.HOOK, OpKind.UNSHARD, OpKind.RESHARD)))),
    Judges("I17", (records_of(OpKind.HOOK), records_of(OpKind.PHASE)), is_whole=False),
)


def check_recompute(traces: Sequence[Trace]) -> list[Violation]:
    """Checks the forward hooks of every rank that ran inside a backward."""
    return [violation for trace in traces for violation in _check_rank(trace)]


def _check_rank(trace: Trace) -> list[Violation]:
    reporter = Reporter(trace)
    hook: Record | None = None
    for record in trace.lean_records:
        op = record["op"]
        if op in _ENDS_A_HOOK:
            is_recomputed = op == OpKind.HOOK and record.get("in_backward", False)
            hook = record if is_recomputed and record["point"] in _FORWARD_POINTS else None
        elif hook is not None:
            fault = _fault(record, unit_key(hook))
            if fault is not None:
                module = hook["module"] or "<root>"
                reporter.report(
                    "I17",
                    f"The recomputed forward of {module} {fault}.",
                    unit=unit_key(record),
                    seq=record["seq"],
                )
    return reporter.found


def _fault(record: Record, unit: UnitKey) -> str | None:
    op = record["op"]
    if op == OpKind.UNSHARD and unit_key(record) != unit:
        return f"gathers unit {unit_key(record)} ahead"
    if op == OpKind.RESHARD:
        return f"releases unit {unit_key(record)}"
    if op == OpKind.PHASE and record["event"] in _FORWARD_EVENTS:
        return (
            f"takes unit {unit_key(record)} from phase '{record['before']}' to '{record['after']}'"
        )
    return None
