"""Where the host's time goes in a step, from a trace that says when the host issued each record.

The time from one record to the next belongs to the first: that is what the host did after it.
Inside MFSDP's own calls, which the hooks put into profiler ranges, it belongs to the call. What
follows a hook's record is the hook and whatever runs up to the next record, so the figures of hooks
are upper bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from real.trace import OpKind, Trace, TraceError
from real.trace.recorder import Record

_HOOKS = "our hooks"
_CALLS = ("unshard", "reshard", "reduce")


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """Host time of one kind of work in one step.

    Attributes:
        what: The work.
        calls: How often it is done.
        total_ns: Nanoseconds of all calls.
        share: Part of the step's host time, 0 to 1.
    """

    what: str
    calls: int
    total_ns: int
    share: float


def host_costs(trace: Trace) -> list[HostCost]:
    """Returns the host time of the last complete step by kind of work, the longest first.

    Raises:
        TraceError: The trace has no complete step, or no host times.
    """
    records = _last_step(trace)
    calls: dict[str, int] = {}
    total: dict[str, int] = {}
    for what, is_call, nanoseconds in _intervals(records):
        calls[what] = calls.get(what, 0) + is_call
        total[what] = total.get(what, 0) + nanoseconds
    whole = sum(total.values())
    costs = [
        HostCost(what=what, calls=calls[what], total_ns=total[what], share=total[what] / whole)
        for what in total
    ]
    return sorted(costs, key=lambda cost: (-cost.total_ns, cost.what))


def _last_step(trace: Trace) -> list[Record]:
    begun = first = last = None
    for index, record in enumerate(trace.records):
        if record["op"] == OpKind.STEP and record["event"] == "begin":
            begun = index
        elif record["op"] == OpKind.STEP and begun is not None:
            first, last, begun = begun, index, None
    if first is None or last is None:
        raise TraceError(f"rank {trace.rank}: expected a complete step, got none.")
    records = trace.records[first : last + 1]
    if any("host_ns" not in record for record in records):
        raise TraceError(
            f"rank {trace.rank}: expected host times, got records without; "
            "torchrun -m real trace --durations records them."
        )
    return records


def _intervals(records: list[Record]) -> Iterator[tuple[str, bool, int]]:
    """Yields what the host did after each record, whether a call began there, and how long."""
    inside: list[str] = []
    for record, successor in itertools.pairwise(records):
        op = record["op"]
        is_call = False
        if op == OpKind.NVTX_PUSH:
            word = record["text"].rpartition(" ")[2]
            is_call = record["text"].startswith("MFSDP ") and word in _CALLS
            inside.append(f"MFSDP {word}" if is_call else "")
        named = next((name for name in reversed(inside) if name), None)
        if op == OpKind.NVTX_POP and inside:
            inside.pop()
        if named is None:
            named, is_call = _work_after(record)
        yield named, is_call, successor["host_ns"] - record["host_ns"]


def _work_after(record: Record) -> tuple[str, bool]:
    op = record["op"]
    if op == OpKind.HOOK:
        return f"{_HOOKS}: {record['point']}", True
    if op in (OpKind.RESHARD, OpKind.REDUCE):
        return f"{_HOOKS}: {op}", True
    if op == OpKind.COLLECTIVE:
        return f"{record['kind']} of the schedule", True
    if op in (OpKind.OPTIMIZER_STEP, OpKind.GRAD_READ):
        return "gradients and optimizer", op == OpKind.OPTIMIZER_STEP
    if op in (OpKind.EVENT_RECORD, OpKind.STREAM_WAIT, OpKind.RECORD_STREAM):
        return "streams and events of the schedule", True
    return "modules and schedule", op == OpKind.NODE
