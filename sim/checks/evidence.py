"""What a trace holds, in the words in which checks say what they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.checks.memory import most_packed
from sim.checks.rules import (
    BOUND,
    COUNTED,
    DIVISORS,
    GATHERS,
    PACKED_BOUND,
    REDUCTIONS,
    SEVERAL_RANKS,
    named,
    records_of,
)
from sim.checks.units import most_unsharded

_EITHER: Final = (
    (OpKind.OPTIMIZER_STEP, OpKind.GRAD_READ),
    (OpKind.RESIZE, OpKind.FREE),
)
"""Operations of which a check takes one or the other."""


def evidence_of(trace: Trace, num_ranks: int) -> frozenset[str]:
    """Returns what one rank's trace holds.

    Args:
        trace: The rank's trace.
        num_ranks: Of how many ranks there are traces.
    """
    ops = {record["op"] for record in trace.records}
    words = {records_of(OpKind(op)) for op in ops}
    words.update(records_of(*either) for either in _EITHER if not ops.isdisjoint(either))
    words.update(word for record in trace.lean_records for word in _words(record))
    if num_ranks > 1:
        words.add(SEVERAL_RANKS)
    if most_unsharded(trace) is not None:
        words.add(BOUND)
    if most_packed(trace) is not None:
        words.add(PACKED_BOUND)
    return frozenset(words)


def _words(record: Record) -> Iterator[str]:
    """Yields what a record is, beyond its operation."""
    op = record["op"]
    if op == OpKind.COLLECTIVE:
        if record["unit"] is not None:
            if record["kind"] == "all_gather":
                yield GATHERS
            elif record["kind"] in ("reduce_scatter", "all_reduce"):
                yield REDUCTIONS
    elif op == OpKind.NAME:
        yield named(record["kind"])
    elif op == OpKind.PARAMETER:
        if record["fires"]:
            yield COUNTED
    elif op == OpKind.UNIT and "divisor" in record:
        yield DIVISORS
