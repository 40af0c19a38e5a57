"""Further checks on traces that single cases need: gathers counted, releases, overlap, ranges.

They are pure functions like those of `sim.checks`, kept here because each needs to be told what a
case expects (how many gathers, which order allows overlap) or judges what the hooks never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.checks import Access, Violation
from sim.checks.base import unit_label, walk
from sim.checks.clocks import StreamClocks

OVERLAP = "overlap"
"""The rule of cases about time: an order of records under which two things cannot overlap."""


def check_late_readers(traces: Sequence[Trace]) -> list[Violation]:
    """I4: a full weight that a node has gathered is released before the node's last read of it.

    Seen where the reader comes after the release in host order and nothing gathers in between.
    """
    found = []
    for trace in traces:
        names = _full_weights(trace)
        released: dict[int, Record] = {}
        reported: set[int] = set()
        for record, place in walk(trace):
            op = record["op"]
            if op == OpKind.RESIZE and record["storage"] in names:
                if record["bytes"] == 0:
                    released[record["storage"]] = record
                else:
                    released.pop(record["storage"], None)
            elif op == OpKind.KERNEL:
                for storage in record["reads"]:
                    release = released.get(storage)
                    if release is None or storage in reported:
                        continue
                    reported.add(storage)
                    found.append(
                        Violation(
                            rule="I4",
                            rank=trace.rank,
                            message=f"The full weight of unit {unit_label(names[storage])} is "
                            "released before its last reader.",
                            unit=unit_label(names[storage]),
                            node=place.node,
                            microbatch=place.microbatch,
                            first=Access(release["seq"], release["stream"], "release"),
                            second=Access(
                                record["seq"], record["stream"], f"{record['name']} reads"
                            ),
                            hook=place.hook,
                            seq=record["seq"],
                        )
                    )
    return found


def check_gathers(traces: Sequence[Trace], *, most: int, extra: int = 0) -> list[Violation]:
    """I2: a unit is gathered at most so often in one microbatch, forward and backward together.

    Args:
        traces: All ranks.
        most: Gathers of a unit per microbatch.
        extra: Further gathers of a unit per step.
    """
    found = []
    for trace in traces:
        counts: Counter[str] = Counter()
        allowed = most * int(trace.scenario.get("num_microbatches", 1)) + extra
        for record, place in walk(trace):
            if record["op"] == OpKind.STEP and record["event"] == "begin":
                counts.clear()
            elif record["op"] == OpKind.COLLECTIVE and record["kind"] == "all_gather":
                unit = record["unit"]
                if unit is None or not _is_in_schedule(record, trace):
                    continue
                counts[unit] += 1
                if counts[unit] == allowed + 1:
                    found.append(
                        Violation(
                            rule="I2",
                            rank=trace.rank,
                            message=f"Unit {unit_label(unit)} is gathered more than {allowed} "
                            "times in a step.",
                            unit=unit_label(unit),
                            node=place.node,
                            microbatch=place.microbatch,
                            hook=place.hook,
                            seq=record["seq"],
                        )
                    )
    return found


def check_reductions(traces: Sequence[Trace]) -> list[Violation]:
    """I5: every trainable unit is reduced once for each microbatch of a step, wherever that is."""
    found = []
    for trace in traces:
        expected = trace.scenario["num_microbatches"]
        units = [r["unit"] for r in trace.records if r["op"] == OpKind.UNIT and r["trainable"]]
        counts: Counter[str] = Counter()
        for record in trace.records:
            if record["op"] == OpKind.REDUCE:
                counts[record["unit"]] += 1
            elif record["op"] == OpKind.STEP and record["event"] == "end":
                for unit in units:
                    if counts[unit] != expected:
                        found.append(
                            Violation(
                                rule="I5",
                                rank=trace.rank,
                                message=f"Unit {unit_label(unit)} is reduced {counts[unit]} times "
                                f"in a step of {expected} microbatches.",
                                unit=unit_label(unit),
                                seq=record["seq"],
                            )
                        )
                counts.clear()
    return found


def check_equal_steps(traces: Sequence[Trace]) -> list[Violation]:
    """I12: a unit is gathered as often in every window as in the first."""
    found = []
    for trace in traces:
        first: Counter[str] | None = None
        counts: Counter[str] = Counter()
        for record in trace.records:
            if record["op"] == OpKind.UNSHARD and record["gathered"]:
                counts[record["unit"]] += 1
            elif record["op"] == OpKind.STEP and record["event"] == "end":
                if first is None:
                    first = counts
                for unit in sorted(first | counts):
                    if counts[unit] != first[unit]:
                        found.append(
                            Violation(
                                rule="I12",
                                rank=trace.rank,
                                message=f"Unit {unit_label(unit)} is gathered {counts[unit]} times "
                                f"in step {record['step']} and {first[unit]} times in the first.",
                                unit=unit_label(unit),
                                seq=record["seq"],
                            )
                        )
                counts = Counter()
    return found


def check_ranges(traces: Sequence[Trace]) -> list[Violation]:
    """I18: every profiler range that a unit opens is closed by the end of the step."""
    found = []
    for trace in traces:
        stack: list[tuple[Record, str | None, int | None]] = []
        for record, place in walk(trace):
            if record["op"] == OpKind.NVTX_PUSH:
                stack.append((record, place.node, place.microbatch))
            elif record["op"] == OpKind.NVTX_POP and stack:
                stack.pop()
            elif record["op"] == OpKind.STEP and record["event"] == "end":
                for opened, node, microbatch in stack:
                    words = opened["text"].split(" ")
                    found.append(
                        Violation(
                            rule="I18",
                            rank=trace.rank,
                            message=f"The profiler range {opened['text']!r} is never closed.",
                            unit=words[1] if words[0] == "MFSDP" else None,
                            node=node,
                            microbatch=microbatch,
                            seq=opened["seq"],
                        )
                    )
                stack = []
    return found


def check_gather_overlap(traces: Sequence[Trace], *, units: Sequence[str]) -> list[Violation]:
    """The gathers of some units can overlap compute: some kernel is ordered neither way with them.

    Not a time: what no wait forbids can overlap on a GPU, what a wait forbids never does. A gather
    is judged by the first wait for it; a unit is reported when none of its forward gathers can.

    Args:
        traces: All ranks.
        units: Names of the units that have to be gathered ahead.
    """
    found = []
    for trace in traces:
        hidden = dict.fromkeys(units, 0)
        first: dict[str, tuple[int, str | None, int | None]] = {}
        for unit, num_kernels, seq, node, microbatch in _forward_gathers(trace):
            if unit in hidden:
                first.setdefault(unit, (seq, node, microbatch))
                hidden[unit] += num_kernels > 0
        for unit, (seq, node, microbatch) in first.items():
            if hidden[unit] == 0:
                found.append(
                    Violation(
                        rule=OVERLAP,
                        rank=trace.rank,
                        message=f"No gather of unit {unit_label(unit)} can overlap any compute.",
                        unit=unit_label(unit),
                        node=node,
                        microbatch=microbatch,
                        seq=seq,
                    )
                )
    return found


def _forward_gathers(
    trace: Trace,
) -> Iterator[tuple[str, int, int, str | None, int | None]]:
    """Yields unit, number of kernels that may run beside it, and place of each gather.

    A kernel may run beside a gather when the gather's stream has not waited for it, and nobody
    has waited for the gather before the kernel was launched.
    """
    clocks = StreamClocks()
    kernels: dict[int, list[int]] = {}
    pending: list[tuple[str, int, int, dict[int, int], str | None, int | None]] = []
    for record, place in walk(trace):
        op = record["op"]
        if op == OpKind.KERNEL:
            kernels.setdefault(record["stream"], []).append(record["seq"])
        elif op == OpKind.COLLECTIVE and record["kind"] == "all_gather":
            if record["unit"] is not None and str(place.hook).startswith("pre_forward"):
                stream = record["stream"]
                pending.append(
                    (
                        record["unit"],
                        stream,
                        record["seq"],
                        dict(clocks.clock(stream)),
                        place.node,
                        place.microbatch,
                    )
                )
        clocks.advance(record)
        if op in (OpKind.EVENT_WAIT, OpKind.STREAM_WAIT) and pending:
            waiting = record["stream"]
            still = []
            for entry in pending:
                unit, stream, seq, known, node, microbatch = entry
                if waiting == stream or not clocks.is_ordered_after(waiting, stream, seq):
                    still.append(entry)
                    continue
                beside = sum(
                    known.get(other, -1) < kernel < record["seq"]
                    for other, launched in kernels.items()
                    if other != stream
                    for kernel in launched
                )
                yield unit, beside, seq, node, microbatch
            pending = still


def _full_weights(trace: Trace) -> dict[int, str]:
    """Returns the unit of every storage that holds full weights."""
    names = {r["storage"]: r["name"] for r in trace.records if r["op"] == OpKind.NAME}
    return {
        storage: name.partition(":")[0]
        for storage, name in names.items()
        if name.partition(":")[2] == "full weight"
    }


def _is_in_schedule(record: Record, trace: Trace) -> bool:
    return bool(record["unit"] is not None)
