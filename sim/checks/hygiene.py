"""I16: hooks are installed once, and each of them fires once a call.

Two hooks of one point on one module show in the trace as a pair of equal records with nothing but
the work of the first between them. Backward hooks are left out: a module with two outputs of one
autograd node is announced twice, which is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.rules import Judges, records_of

_JUDGED_POINTS: Final = ("pre_forward", "post_forward")

# What a hook itself does; anything else ends the question whether the next one is its twin.
_OF_A_HOOK: Final = frozenset(
    {
        OpKind.UNSHARD,
        OpKind.RESHARD,
        OpKind.PHASE,
        OpKind.WEIGHT_VERSION,
        OpKind.EVENT_RECORD,
        OpKind.EVENT_WAIT,
        OpKind.STREAM_WAIT,
        OpKind.RESIZE,
        OpKind.COLLECTIVE,
        OpKind.NVTX_PUSH,
        OpKind.NVTX_POP,
    }
)

JUDGES: Final = (
    Judges("I16", (records_of(OpKind.INSTALL),)),
    Judges("I16", (records_of(OpKind.HOOK),)),
)


def check_hygiene(traces: Sequence[Trace]) -> list[Violation]:
    """Checks that no rank has hooks twice."""
    return [violation for trace in traces for violation in _check_rank(trace)]


def _check_rank(trace: Trace) -> list[Violation]:
    reporter = Reporter(trace)
    _check_installations(trace, reporter)
    _check_twins(trace, reporter)
    return reporter.found


def _check_installations(trace: Trace, reporter: Reporter) -> None:
    installed: dict[int, int] = {}
    for record in trace.lean_records:
        if record["op"] == OpKind.REMOVE:
            installed.pop(record["model"], None)
        elif record["op"] == OpKind.INSTALL:
            before = installed.setdefault(record["model"], record["seq"])
            if before != record["seq"]:
                reporter.report(
                    "I16",
                    f"Hooks are installed on model {record['model']} that has them since record "
                    f"{before}.",
                    seq=record["seq"],
                )


def _check_twins(trace: Trace, reporter: Reporter) -> None:
    num_fires: Counter[tuple[str, UnitKey]] = Counter()
    twins: dict[tuple[str, UnitKey], list[Record]] = {}
    open_hook: Record | None = None
    for record in trace.lean_records:
        op = record["op"]
        if op == OpKind.HOOK and record["point"] in _JUDGED_POINTS:
            key = _call_of(record)
            num_fires[key] += 1
            if open_hook is not None and _call_of(open_hook) == key:
                if not _has_kernel_between(trace, open_hook, record):
                    twins.setdefault(key, []).append(record)
                    open_hook = None
                    continue
            open_hook = record
        elif op not in _OF_A_HOOK:
            open_hook = None
    if not twins:
        return
    # Without kernels a module that is called twice in a row looks the same (MTP's output layer):
    # there only a model counts of which every hook has a twin each time.
    are_all_doubled = all(num_fires[key] == 2 * len(twins.get(key, ())) for key in num_fires)
    first_kernel, last_kernel = _kernel_range(trace)
    for key, records in twins.items():
        if not are_all_doubled:
            records = [r for r in records if first_kernel < r["seq"] < last_kernel]
        if records:
            point, module = key
            reporter.report(
                "I16",
                f"Hook {point} of {module} fires twice for one call, {len(records)} "
                "time(s) in the trace.",
                unit=unit_key(records[0]),
                seq=records[0]["seq"],
            )


def _call_of(hook: Record) -> tuple[str, UnitKey]:
    """Returns a hook's point, and its module as a name in its chunk."""
    return hook["point"], unit_key(hook).beside(hook["module"])


def _kernel_range(trace: Trace) -> tuple[int, int]:
    """Returns the first and last record of a kernel; all hooks between are told apart by them."""
    kernels = [record["seq"] for record in trace.records if record["op"] == OpKind.KERNEL]
    return (kernels[0], kernels[-1]) if kernels else (0, 0)


def _has_kernel_between(trace: Trace, first: Record, second: Record) -> bool:
    offset = trace.records[0]["seq"]
    between = trace.records[first["seq"] - offset : second["seq"] - offset]
    return any(record["op"] == OpKind.KERNEL for record in between)
