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
from sim.checks.base import Access, Violation, unit_label, walk
from sim.checks.clocks import StreamClocks

_USES: Final = frozenset({"pre_forward", "pre_backward"})
_ENDS: Final = frozenset({OpKind.HOOK, OpKind.NODE, OpKind.NODE_END, OpKind.STEP})


class _Use(NamedTuple):
    """A use of a unit that its stream has to be ready for."""

    unit: str
    access: Access
    hook: str


def check_uses(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's uses of units; reports each unit once a stream."""
    return [violation for trace in traces for violation in _check_rank(trace)]


def _check_rank(trace: Trace) -> list[Violation]:
    found: list[Violation] = []
    clocks = StreamClocks()
    gathers: dict[str, Access] = {}
    reported: set[tuple[str, int]] = set()
    hook: tuple[str, str] | None = None
    use: _Use | None = None
    for record, place in walk(trace):
        op = record["op"]
        if op in _ENDS:
            gather = None if use is None else gathers.get(use.unit)
            if use is not None and gather is not None:
                stream = use.access.stream
                is_ready = clocks.is_ordered_after(stream, gather.stream, gather.seq)
                if not is_ready and (use.unit, stream) not in reported:
                    reported.add((use.unit, stream))
                    found.append(
                        Violation(
                            rule="I1",
                            rank=trace.rank,
                            message=f"Unit {unit_label(use.unit)} is used in no order with its "
                            "gather.",
                            unit=unit_label(use.unit),
                            node=place.node,
                            microbatch=place.microbatch,
                            first=gather,
                            second=use.access,
                            missing=f"stream {stream} never waits for stream {gather.stream} "
                            f"after record {gather.seq}",
                            hook=use.hook,
                            seq=record["seq"],
                        )
                    )
            hook, use = None, None
        if op == OpKind.HOOK and record["point"] in _USES:
            hook = (record["unit"], place.hook or "")
        elif op == OpKind.UNSHARD and hook is not None and record["unit"] == hook[0]:
            # Others that follow the same hook are gathered ahead of their use.
            use = _Use(hook[0], Access(record["seq"], record["stream"], "use"), hook[1])
        elif op == OpKind.COLLECTIVE:
            if record["kind"] == "all_gather" and record["unit"] is not None:
                gathers[record["unit"]] = Access(record["seq"], record["stream"], "all_gather")
        clocks.advance(record)
    return found
