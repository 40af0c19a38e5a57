"""Further checks of single cases: how often units are gathered, and what stays behind.

Pure functions like those of `sim.checks`, kept here because each is told what its case expects, or
judges what the hooks never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from real.trace import OpKind, Trace
from real.trace.read import named_storages, walk
from real.trace.recorder import Record
from sim.checks import Access, Violation
from sim.checks.base import unit_label


def check_late_readers(traces: Sequence[Trace]) -> list[Violation]:
    """I4: a full weight that a node has gathered is released before the node's last read of it.

    Seen where the reader comes after the release in host order and nothing gathers in between.
    """
    found = []
    for trace in traces:
        names = _full_weights(trace)
        released: dict[int, Record] = {}
        reported: set[int] = set()
        for record, place in walk(trace.records):
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


def _full_weights(trace: Trace) -> dict[int, str]:
    """Returns the unit of every storage that holds full weights."""
    return {
        storage: named.unit.name
        for storage, named in named_storages(trace).items()
        if named.kind == "full weight"
    }


def check_gathers(
    traces: Sequence[Trace],
    *,
    most: int,
    extra: int = 0,
    least: int = 0,
    units: Sequence[str] | None = None,
) -> list[Violation]:
    """A unit is gathered so often in a step: I2 when it is more, I12 when it is less.

    Args:
        traces: All ranks.
        most: Most gathers of a unit per microbatch, forward and backward together.
        extra: Further gathers of a unit per step.
        least: Fewest gathers of a unit per microbatch.
        units: Names of the units that are judged; None for all.
    """
    found = []
    for trace in traces:
        num_microbatches = trace.scenario["num_microbatches"]
        counts: Counter[str] = Counter()
        for record, place in walk(trace.records):
            if record["op"] == OpKind.UNSHARD and record["gathered"]:
                counts[record["unit"]] += 1
                if counts[record["unit"]] != most * num_microbatches + extra + 1:
                    continue
                rule, how = "I2", f"more than {most * num_microbatches + extra}"
                judged = [record["unit"]]
            elif record["op"] == OpKind.STEP and record["event"] == "end":
                rule, how = "I12", f"less than {least * num_microbatches}"
                judged = [u for u in sorted(counts) if counts[u] < least * num_microbatches]
                counts = Counter()
            else:
                continue
            for unit in judged:
                if units is not None and unit not in units:
                    continue
                found.append(
                    Violation(
                        rule=rule,
                        rank=trace.rank,
                        message=f"Unit {unit_label(unit)} is gathered {how} times in a step.",
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


def check_loss_inputs(traces: Sequence[Trace]) -> list[Violation]:
    """I20: what the last forward node made is gone when its microbatch's backward is over.

    The schedule is done with a microbatch some records after its last node: the next node, or the
    read of the gradients, is the latest point.
    """
    found = []
    for trace in traces:
        alive: set[int] = set()
        made: dict[int, set[int]] = {}
        over: list[int] = []
        for record, place in walk(trace.records):
            op = record["op"]
            if op == OpKind.ALLOCATE:
                alive.add(record["storage"])
            elif op == OpKind.FREE or (op == OpKind.RESIZE and record["bytes"] == 0):
                alive.discard(record["storage"])
            if op == OpKind.KERNEL and place.node == "post_process forward":
                assert place.microbatch is not None
                made.setdefault(place.microbatch, set()).update(set(record["writes"]) & alive)
            elif op == OpKind.NODE_END and place.node == "pre_process backward":
                assert place.microbatch is not None
                over.append(place.microbatch)
            elif over and op in (OpKind.NODE, OpKind.GRAD_READ):
                for microbatch in over:
                    left = made.pop(microbatch, set()) & alive
                    if left:
                        found.append(
                            Violation(
                                rule="I20",
                                rank=trace.rank,
                                message=f"{len(left)} tensors of the last forward node are in "
                                "memory after their backward.",
                                unit="<root>",
                                node="pre_process backward",
                                microbatch=microbatch,
                                seq=record["seq"],
                            )
                        )
                over = []
    return found


def check_frozen(traces: Sequence[Trace]) -> list[Violation]:
    """I3: in cooldown a frozen unit is released before the next layer's backward begins.

    In cooldown nothing runs forward, so no other microbatch can need it.
    """
    found = []
    for trace in traces:
        frozen = {r["unit"] for r in trace.records if r["op"] == OpKind.UNIT and not r["trainable"]}
        unsharded: set[str] = set()
        ended: tuple[str, str, int | None] | None = None
        for record, place in walk(trace.records):
            op = record["op"]
            if op == OpKind.UNSHARD:
                unsharded.add(record["unit"])
            elif op == OpKind.RESHARD:
                unsharded.discard(record["unit"])
            elif op == OpKind.NODE_END and record["direction"] == "backward":
                node = str(place.node)
                name, _, layer = node.partition(" of layer ")
                if name == "pre_dispatch_computation backward":
                    ended = f"decoder.layers.{int(layer) - 1}", node, place.microbatch
            elif op == OpKind.NODE and record["phase"] == "cooldown" and ended is not None:
                layer, node, microbatch = ended
                for unit in sorted(frozen & unsharded):
                    if unit == layer or unit.startswith(f"{layer}."):
                        found.append(
                            Violation(
                                rule="I3",
                                rank=trace.rank,
                                message=f"The frozen unit {unit} is unsharded after the backward "
                                "of its layer.",
                                unit=unit,
                                node=node,
                                microbatch=microbatch,
                                seq=record["seq"],
                            )
                        )
                ended = None
    return found


def check_ranges(traces: Sequence[Trace]) -> list[Violation]:
    """I18: every profiler range that a unit opens is closed by the end of the step."""
    found = []
    for trace in traces:
        stack: list[tuple[Record, str | None, int | None]] = []
        for record, place in walk(trace.records):
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
