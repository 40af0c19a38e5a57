"""The life of FSDP units: gathered once, released once, reduced once, all at rest at the end.

Covers I2, I3, I5, I8, I9, I18, I20 and the counting part of I12, from what hooks and units record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from sim.checks.base import Violation, unit_label, walk
from sim.checks.clocks import StreamClocks

MOST_UNSHARDED: Final = {"none": 3, "forward": 4, "both": 5}
"""Units unsharded at the same time under combined 1F1B, by prefetch policy.

One more for each of: a frozen unit (kept until its layer's last backward node), a recomputed
layernorm and a dense layer (both have a layer gathered from its mlp node's backward on).
"""


def check_units(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's units, and that ranks reduce the same units equally often."""
    found = [violation for trace in traces for violation in _check_rank(trace)]
    return found + _check_participation(traces)


def _check_rank(trace: Trace) -> list[Violation]:
    found: list[Violation] = []
    unsharded: set[str] = set()
    reductions: Counter[tuple[str, int | None]] = Counter()
    clocks = StreamClocks()
    last_reduce: dict[str, tuple[int, int]] = {}
    optimizer: tuple[int, int] | None = None
    nvtx_depth = 0
    is_combined = trace.scenario.get("overlap_moe_expert_parallel_comm", False)
    bound = MOST_UNSHARDED.get(trace.scenario.get("prefetch", "")) if is_combined else None
    if bound is not None:
        bound += trace.scenario.get("recompute_granularity") == "selective" and "layernorm" in str(
            trace.scenario.get("recompute_modules")
        )
        bound += "0" in str(trace.scenario.get("moe_layer_freq"))
    has_frozen = False
    reduced_unsharded: set[str] = set()

    def report(rule: str, message: str, unit: str | None) -> None:
        found.append(
            Violation(
                rule=rule,
                rank=trace.rank,
                message=message,
                unit=unit_label(unit),
                node=place.node,
                microbatch=place.microbatch,
                hook=place.hook,
                seq=record["seq"],
            )
        )

    for record, place in walk(trace):
        op = record["op"]
        if op == OpKind.UNIT:
            if record["trainable"] == 0 and bound is not None and not has_frozen:
                has_frozen = True
                bound += 1
        elif op == OpKind.UNSHARD:
            unit = record["unit"]
            if record["gathered"] and unit in unsharded:
                report("I2", f"Unit {unit_label(unit)} is gathered while it is unsharded.", unit)
            if not record["gathered"] and unit not in unsharded:
                report("I1", f"Unit {unit_label(unit)} is taken as unsharded and is not.", unit)
            unsharded.add(unit)
            if bound is not None and len(unsharded) > bound:
                names = ", ".join(str(unit_label(name)) for name in sorted(unsharded))
                report("I20", f"Expected at most {bound} units unsharded, got {names}.", unit)
                bound = None  # once a run: the rest follows from it
        elif op == OpKind.RESHARD:
            unit = record["unit"]
            if unit not in unsharded:
                report("I3", f"Unit {unit_label(unit)} is released and was not gathered.", unit)
            unsharded.discard(unit)
            if unit in reduced_unsharded and str(place.hook).startswith("post_gradient"):
                report(
                    "I20",
                    f"Unit {unit_label(unit)} is released after its gradient buffer was allocated.",
                    unit,
                )
            reduced_unsharded.discard(unit)
        elif op == OpKind.REDUCE:
            reductions[record["unit"], place.microbatch] += 1
            if record["unit"] in unsharded:
                reduced_unsharded.add(record["unit"])
            # The plain schedule runs no nodes, so no record has a microbatch: judge the step.
            is_in_microbatch = place.microbatch is not None
            allowed = 1 if is_in_microbatch else trace.scenario.get("num_microbatches")
            if allowed and reductions[record["unit"], place.microbatch] == allowed + 1:
                how_often = "twice in one" if is_in_microbatch else "more than once a"
                report(
                    "I5",
                    f"Unit {unit_label(record['unit'])} is reduced {how_often} microbatch.",
                    record["unit"],
                )
        elif op == OpKind.COLLECTIVE:
            if record["kind"] in ("reduce_scatter", "all_reduce") and record["unit"] is not None:
                last_reduce[record["unit"]] = (record["stream"], record["seq"])
            if record["kind"] == "all_gather" and record["unit"] is not None:
                if optimizer is not None and not clocks.is_ordered_after(
                    record["stream"], *optimizer
                ):
                    report(
                        "I9",
                        f"Unit {unit_label(record['unit'])} is gathered in no order with the "
                        "optimizer's write of its weights.",
                        record["unit"],
                    )
                    optimizer = None
        elif op in (OpKind.OPTIMIZER_STEP, OpKind.GRAD_READ):
            for unit, (stream, seq) in last_reduce.items():
                if not clocks.is_ordered_after(record["stream"], stream, seq):
                    report(
                        "I8",
                        f"Gradients of unit {unit_label(unit)} are read in no order with their "
                        "last reduction.",
                        unit,
                    )
            if op == OpKind.OPTIMIZER_STEP:
                optimizer = (record["stream"], record["seq"])
        elif op == OpKind.NVTX_PUSH:
            nvtx_depth += 1
        elif op == OpKind.NVTX_POP:
            nvtx_depth -= 1
            if nvtx_depth < 0:
                report("I18", "A profiler range is closed that was not opened.", None)
                nvtx_depth = 0
        elif op == OpKind.STEP:
            if record["event"] == "begin":
                reductions.clear()
                last_reduce.clear()
            for unit in sorted(unsharded):
                report("I3", f"Unit {unit_label(unit)} is unsharded at the end of a step.", unit)
            unsharded.clear()
            if nvtx_depth:
                report("I18", f"{nvtx_depth} profiler ranges are open at the end of a step.", None)
                nvtx_depth = 0
        clocks.advance(record)
        if op == OpKind.OPTIMIZER_STEP:
            clocks.clock(record["stream"])[record["stream"]] = record["seq"]
    return found


def _check_participation(traces: Sequence[Trace]) -> list[Violation]:
    counts = [
        Counter(r["unit"] for r in trace.records if r["op"] == OpKind.REDUCE) for trace in traces
    ]
    found = []
    for trace, count in zip(traces, counts, strict=True):
        for unit in sorted(set(counts[0]) | set(count)):
            if count[unit] != counts[0][unit]:
                found.append(
                    Violation(
                        rule="I12",
                        rank=trace.rank,
                        message=f"Unit {unit_label(unit)} is reduced {count[unit]} times here and "
                        f"{counts[0][unit]} times on rank {traces[0].rank}.",
                        unit=unit_label(unit),
                    )
                )
    return found
