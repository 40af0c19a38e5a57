"""What a run raised, as violations: the rule, the unit, and where in the schedule it happened.

Some broken rules stop a run before any trace can be judged: the hooks refuse an illegal step, ranks
meet in different collectives, autograd or MFSDP find a weight or a gradient missing. Each of these
errors belongs to one invariant. An error that is none of them is no violation: it is a defect of
the bench or of the case, and stays visible as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

from real.trace import OpKind, Trace
from real.trace.read import Place, named_storages, walk
from real.trace.recorder import Record
from sim.checks.base import Violation, unit_label
from sim.world import ErrorKind


class RunError(Protocol):
    """How a world of ranks says that a run failed."""

    problem: str
    kind: ErrorKind
    rank: int | None
    standing: list[str]
    __cause__: BaseException | None


_RELEASED: Final = (
    r"out of bounds for storage of size 0"
    r"|data is not allocated yet"
    r"|storage was released"
    r"|mixed torch\.Tensor and DTensor"
)
_RULES: Final = (
    (_RELEASED, "I1"),
    (r"modified by an inplace operation", "I21"),
    (r"Final callbacks can only be installed", "I8"),
    (r"Missing gradient for FSDP parameter", "I6"),
    (r"sharded gradients must be either all set or all None", "I6"),
    (r"assign a gradient with dtype", "I13"),
    (r"no device in this thread", "I16"),  # a hook in a thread that is no rank's
    (r"already owned by another FsdpModule", "I15"),
    (r"context is already initialized for a descendant", "I15"),
)
"""What torch and MFSDP say, and the invariant that it breaks."""


def violations_of_error(error: RunError, traces: Sequence[Trace]) -> list[Violation]:
    """Returns the violation that an error stands for; empty when it stands for none.

    Args:
        error: What ended the run.
        traces: What each rank had recorded by then.
    """
    cause = error.__cause__
    if error.rank is None:
        return _deadlock(error, traces) if error.kind is ErrorKind.DEADLOCK else []
    trace = traces[error.rank]
    rule: str | None = getattr(cause, "rule", None)
    unit: str | None = getattr(cause, "unit", None)
    if rule is None and error.kind is ErrorKind.MISMATCH:
        rule, unit = "I11", _last_collective_unit(trace)
    if rule is None:
        rule = next((r for pattern, r in _RULES if re.search(pattern, error.problem)), None)
        unit = _unit_of_sharded(cause) if "mixed torch.Tensor" in error.problem else None
        unit = _unit_at_end(trace, rule) if unit is None else unit
    if rule is None:
        return []
    return [_at_end(trace, rule, error.problem, unit)]


def _deadlock(error: RunError, traces: Sequence[Trace]) -> list[Violation]:
    """Names the first rank that waits for one that does not come, and the unit that it is at."""
    for trace, standing in zip(traces, error.standing, strict=True):
        if "waits for rank" in standing:
            where = standing.partition(": ")[2]
            message = f"{error.problem.rstrip('.')}: rank {trace.rank} is {where}."
            return [_at_end(trace, "I12", message, _last_collective_unit(trace))]
    return []


def _at_end(trace: Trace, rule: str, message: str, unit: str | None) -> Violation:
    place = Place()
    seq = None
    for record, here in walk(trace.records):
        place, seq = here, record["seq"]
    return Violation(
        rule=rule,
        rank=trace.rank,
        message=message.splitlines()[0],
        unit=unit_label(unit),
        node=place.node,
        microbatch=place.microbatch,
        hook=place.hook,
        seq=seq,
    )


def _unit_of_sharded(error: BaseException | None) -> str | None:
    """Returns the unit of the sharded parameters that code computed with, innermost call first.

    Such a call never becomes a kernel, so the trace does not have it; the stack of the error does.
    """
    from torch import nn

    from real.mcore.internals import unit_of_sharded

    frames = []
    traceback = None if error is None else error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        values = list(frame.f_locals.values())
        parameters = [value for value in values if isinstance(value, nn.Parameter)]
        parameters += [p for v in values if isinstance(v, nn.Module) for p in v.parameters()]
        for parameter in parameters:
            unit = unit_of_sharded(parameter)
            if unit is not None:
                return unit
    return None


def _last_collective_unit(trace: Trace) -> str | None:
    last = next((r for r in reversed(trace.records) if r["op"] == OpKind.COLLECTIVE), None)
    return None if last is None else last["unit"]


def _unit_at_end(trace: Trace, rule: str | None) -> str | None:
    """Returns the unit at work where the trace ends.

    For a weight that was not there, the unit whose buffer the last kernel asked for; else the unit
    of the newest hook, gather, release or reduction, or of MFSDP's own profiler range.
    """
    if rule == "I8":
        return ""  # only the root installs autograd's final callback
    if rule == "I1":
        names = named_storages(trace)
        kernel = next((r for r in reversed(trace.records) if r["op"] == OpKind.KERNEL), None)
        for storage in [] if kernel is None else kernel["reads"]:
            if storage in names:
                return names[storage].unit.name
    units = map(_unit_of, reversed(trace.records))
    return next((unit for unit in units if unit is not None), None)


def _unit_of(record: Record) -> str | None:
    if record["op"] in (OpKind.HOOK, OpKind.UNSHARD, OpKind.RESHARD, OpKind.REDUCE):
        return str(record["unit"])
    if record["op"] == OpKind.NVTX_PUSH and record["text"].startswith("MFSDP "):
        name = record["text"].split(" ")[1]
        return "" if name == "<root>" else name
    return None
