"""What can run beside what, judged by order and not by time.

* "overlap", `check_exposed`: the compute stream waits for a reduction with no kernel of its own
  since the launch, while the step has more nodes to run; nothing hides the reduction.
* "overlap", `check_queued`: a gather is queued behind a reduction that its consumer does not need,
  on the same stream or on the same communicator, which runs its calls in launch order.
* "coverage", `check_coverage`: some forward runs against the backward of another microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import walk
from sim.cases.ordering import OVERLAP
from sim.checks import Violation
from sim.checks.base import unit_label
from sim.checks.clocks import StreamClocks

_REDUCTIONS: Final = ("reduce_scatter", "all_reduce")


def check_exposed(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for reductions that are waited for at once in the middle of a step."""
    return [violation for trace in traces for violation in _exposed(trace)]


def _exposed(trace: Trace) -> list[Violation]:
    found: list[Violation] = []
    clocks = StreamClocks()
    # Reductions that no compute kernel has followed yet, and those already waited for.
    pending: list[tuple[int, int, str]] = []
    waited: list[Violation] = []
    for record, place in walk(trace.records):
        op = record["op"]
        if op == OpKind.NODE:
            found += waited
            waited = []
        elif op in (OpKind.STEP, OpKind.GRAD_READ, OpKind.FENCE):
            pending, waited = [], []
        elif op == OpKind.COLLECTIVE and record["kind"] in _REDUCTIONS and record["unit"]:
            pending.append((record["stream"], record["seq"], record["unit"]))
        elif op == OpKind.KERNEL:
            pending = [entry for entry in pending if entry[0] == record["stream"]]
        clocks.advance(record)
        if op in (OpKind.STREAM_WAIT, OpKind.EVENT_WAIT, OpKind.COLLECTIVE_WAIT):
            for entry in list(pending):
                stream, seq, unit = entry
                if record["stream"] != stream and clocks.is_ordered_after(
                    record["stream"], stream, seq
                ):
                    pending.remove(entry)
                    waited.append(
                        Violation(
                            rule=OVERLAP,
                            rank=trace.rank,
                            message=f"Stream {record['stream']} waits for the reduction of unit "
                            f"{unit} with no kernel since its launch, and has more to do.",
                            unit=unit,
                            node=place.node,
                            microbatch=place.microbatch,
                            hook=place.hook,
                            seq=record["seq"],
                        )
                    )
    return found


def check_queued(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for gathers behind reductions that the compute stream has not waited for."""
    return [violation for trace in traces for violation in _queued(trace)]


def _queued(trace: Trace) -> list[Violation]:
    found = []
    clocks = StreamClocks()
    reductions: list[tuple[int, str, int, str | None]] = []
    for record, place in walk(trace.records):
        if record["op"] == OpKind.COLLECTIVE and record["kind"] in _REDUCTIONS:
            reductions.append((record["stream"], record["group"], record["seq"], record["unit"]))
        elif record["op"] == OpKind.COLLECTIVE and record["kind"] == "all_gather":
            for stream, group, seq, unit in reductions:
                is_same_stream = stream == record["stream"]
                if not is_same_stream and group != record["group"]:
                    continue
                if clocks.is_ordered_after(0, stream, seq) and stream != 0:
                    continue  # the compute stream has waited for it anyway
                where = f"stream {stream}" if is_same_stream else f"communicator {group}"
                found.append(
                    Violation(
                        rule=OVERLAP,
                        rank=trace.rank,
                        message=f"The gather of unit {unit_label(record['unit'])} is queued on "
                        f"{where} behind the reduction of unit {unit_label(unit)}.",
                        unit=unit_label(record["unit"]),
                        node=place.node,
                        microbatch=place.microbatch,
                        hook=place.hook,
                        seq=record["seq"],
                    )
                )
                break
        clocks.advance(record)
    return found


def check_coverage(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for a node that ran while a forward and a backward were interleaved."""
    return [
        Violation(
            rule="coverage",
            rank=trace.rank,
            message="No forward runs against the backward of another microbatch: "
            f"{trace.scenario.get('num_microbatches')} microbatch(es) show no overlap.",
        )
        for trace in traces
        if not any(r["op"] == OpKind.NODE and r["phase"] == "steady" for r in trace.records)
    ]
