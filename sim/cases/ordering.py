"""Orders of records under which two things cannot overlap: the rule of cases about time.

Not a time: on a GPU what no wait forbids can overlap, and what a wait forbids never does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from real.trace import OpKind, Trace
from real.trace.read import walk
from real.trace.recorder import Record
from sim.checks import Access, Violation
from sim.checks.base import unit_label
from sim.checks.clocks import StreamClocks

OVERLAP = "overlap"
"""The rule of cases about time: an order of records under which two things cannot overlap."""


def check_gather_overlap(traces: Sequence[Trace], *, units: Sequence[str]) -> list[Violation]:
    """The gathers of some units run ahead: kernels are launched before anybody waits for them.

    Not a time: on a GPU such kernels can run beside the gather, and what is launched after a wait
    for it never does. A unit is reported when not one of its gathers in forward runs ahead.

    Args:
        traces: All ranks.
        units: Names of the units that have to be gathered ahead.
    """
    found = []
    for trace in traces:
        ahead = dict.fromkeys(units, 0)
        first: dict[str, _Gather] = {}
        for gather, num_kernels in _forward_gathers(trace):
            if gather.unit in ahead:
                first.setdefault(gather.unit, gather)
                ahead[gather.unit] += num_kernels > 0
        for unit, gather in first.items():
            if ahead[unit] == 0:
                found.append(
                    Violation(
                        rule=OVERLAP,
                        rank=trace.rank,
                        message=f"No gather of unit {unit_label(unit)} can overlap any compute.",
                        unit=unit_label(unit),
                        node=gather.node,
                        microbatch=gather.microbatch,
                        seq=gather.seq,
                    )
                )
    return found


class _Gather(NamedTuple):
    """One gather for a forward use, and where it was issued."""

    unit: str
    stream: int
    seq: int
    node: str | None
    microbatch: int | None


def _forward_gathers(trace: Trace) -> Iterator[tuple[_Gather, int]]:
    """Yields each gather with the number of kernels launched before the first wait for it."""
    clocks = StreamClocks()
    kernels: list[int] = []
    pending: list[_Gather] = []
    for record, place in walk(trace.records):
        op = record["op"]
        if op == OpKind.KERNEL:
            kernels.append(record["seq"])
        elif op == OpKind.COLLECTIVE and record["kind"] == "all_gather":
            if record["unit"] is not None and str(place.hook).startswith("pre_forward"):
                pending.append(
                    _Gather(
                        record["unit"],
                        record["stream"],
                        record["seq"],
                        place.node,
                        place.microbatch,
                    )
                )
        clocks.advance(record)
        if op in (OpKind.EVENT_WAIT, OpKind.STREAM_WAIT) and pending:
            waiting = record["stream"]
            joined = [
                gather
                for gather in pending
                if waiting != gather.stream
                and clocks.is_ordered_after(waiting, gather.stream, gather.seq)
            ]
            for gather in joined:
                yield gather, len(kernels) - bisect_left(kernels, gather.seq)
            pending = [gather for gather in pending if gather not in joined]


def check_wgrad_start(traces: Sequence[Trace]) -> list[Violation]:
    """A weight gradient waits for nothing that the end of its input gradient had not waited for.

    Then it can start where the input gradient ends; with another wait it can be held back.
    """
    found = []
    for trace in traces:
        clocks = StreamClocks()
        layer_ends: dict[str, tuple[int, dict[int, int]]] = {}
        started: set[str] = set()
        for record, place in walk(trace.records):
            is_kernel = record["op"] == OpKind.KERNEL
            name, _, layer = str(place.node).partition(" of ")
            if is_kernel and name.endswith(" wgrad") and layer in layer_ends:
                stream = record["stream"]
                dgrad_stream, known = layer_ends[layer]
                for other, seq in clocks.clock(stream).items():
                    if other in (stream, dgrad_stream) or seq <= known.get(other, -1):
                        continue
                    if layer not in started:
                        found.append(_held_back(trace, record, place.microbatch, layer, other, seq))
                started.add(layer)
            clocks.advance(record)
            if is_kernel and name == "mlp backward":
                layer_ends[layer] = (record["stream"], dict(clocks.clock(record["stream"])))
    return found


def _held_back(
    trace: Trace, record: Record, microbatch: int | None, layer: str, other: int, seq: int
) -> Violation:
    return Violation(
        rule=OVERLAP,
        rank=trace.rank,
        message=f"The weight gradient of {layer} waits for stream {other}, which its input "
        "gradient does not need.",
        unit=layer,
        node=f"mlp wgrad of {layer}",
        microbatch=microbatch,
        first=Access(seq, other, "newest work waited for"),
        second=Access(record["seq"], record["stream"], f"{record['name']} starts"),
        seq=record["seq"],
    )
