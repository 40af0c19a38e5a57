"""Rules that some cases need beside the checks of every trace, each with a name of its own.

* I13, `check_last`: the flag for the last microbatch, read at each reduction, is true for the last
  reduction of a unit's window and for no other.
* I5, `check_reductions`: each microbatch with a backward reduces every unit that the step reduces.
* I15, `check_demand`: a hook gathers the nearest unit around its module.
* I14, `check_norms`: the gradient norm is the reference's, and one number on all ranks.
* I11, `both_sides`: ranks that met in different calls, each with its own unit.
* "overlap", `check_exposed`: the compute stream waits for a reduction with no kernel of its own
  since the launch, while the step has more nodes to run; nothing hides the reduction.
* "overlap", `check_queued`: a gather is queued behind a reduction that its consumer does not need,
  on the same stream or on the same communicator, which runs its calls in launch order.
* I20, `check_reduce_inputs`: no reduction packs more than the largest layer or parameter.
* I20, `check_kept_gradients`: full gradients go when their unit is complete.
* "coverage", `check_coverage`: some forward runs against the backward of another microbatch.
* "init", `check_equal`: every rank starts from the same weights.
* "budget", `check_budget`: a hook costs at most so many calls of Python functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from real.result import MAX_GRAD_NORM_REL_ERROR
from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.cases.ordering import OVERLAP
from sim.cases.worlds import Outcome
from sim.checks import Violation
from sim.checks.base import Place, unit_label, walk
from sim.checks.clocks import StreamClocks
from sim.world import MismatchError

if TYPE_CHECKING:
    from real.mcore.jobs import JobOutput

_REDUCTIONS = ("reduce_scatter", "all_reduce")


def both_sides(outcome: Outcome) -> list[Violation]:
    """Names every rank's call where a run ended because ranks met in different ones.

    The world names the rank that came second; the fault may be on the other side.
    """
    if outcome.error is None or not isinstance(outcome.error.__cause__, MismatchError):
        return []
    found = []
    for trace in outcome.traces:
        last: tuple[Record, str | None, int | None] | None = None
        for record, place in walk(trace.records):
            if record["op"] == OpKind.COLLECTIVE:
                last = (record, place.node, place.microbatch)
        if last is not None:
            record, node, microbatch = last
            found.append(
                Violation(
                    rule="I11",
                    rank=trace.rank,
                    message=f"This rank calls {record['kind']} of unit "
                    f"{unit_label(record['unit'])} where another calls something else.",
                    unit=unit_label(record["unit"]),
                    node=node,
                    microbatch=microbatch,
                    seq=record["seq"],
                )
            )
    return found


def check_last(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the flag at each reduction with what turned out to be the last one of its window."""
    found = []
    for trace in traces:
        window: dict[str, list[tuple[bool, Place, int]]] = {}
        for record, place in walk(trace.records):
            if record["op"] == OpKind.REDUCE:
                here = Place(step=place.step, nodes=list(place.nodes), hook=place.hook)
                window.setdefault(record["unit"], []).append((record["last"], here, record["seq"]))
            elif record["op"] == OpKind.STEP and record["event"] == "end":
                found += _wrong_flags(trace.rank, window)
                window = {}
        found += _wrong_flags(trace.rank, window)
    return found


def _wrong_flags(
    rank: int, window: Mapping[str, Sequence[tuple[bool, Place, int]]]
) -> list[Violation]:
    found = []
    for unit, reductions in window.items():
        for number, (flag, place, seq) in enumerate(reductions, start=1):
            is_last = number == len(reductions)
            if flag != is_last:
                found.append(
                    Violation(
                        rule="I13",
                        rank=rank,
                        message=f"Reduction {number} of {len(reductions)} of unit "
                        f"{unit_label(unit)} is taken as {'' if flag else 'not '}the last.",
                        unit=unit_label(unit),
                        node=place.node,
                        microbatch=place.microbatch,
                        hook=place.hook,
                        seq=seq,
                    )
                )
                break
    return found


def check_reductions(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for microbatches that leave a unit's reduction out."""
    found = []
    for trace in traces:
        backwards: set[int] = set()
        reduced: dict[str, set[int | None]] = {}
        for record, place in walk(trace.records):
            if record["op"] == OpKind.NODE and record["direction"] == "backward":
                backwards.add(record["microbatch"])
            elif record["op"] == OpKind.REDUCE:
                reduced.setdefault(record["unit"], set()).add(place.microbatch)
        for unit, microbatches in reduced.items():
            missing = sorted(backwards - microbatches)
            if missing:
                found.append(
                    Violation(
                        rule="I5",
                        rank=trace.rank,
                        message=f"Unit {unit_label(unit)} is not reduced in this microbatch.",
                        unit=unit_label(unit),
                        microbatch=missing[0],
                    )
                )
    return found


def check_demand(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the unit of every demand hook with the nearest unit around its module."""
    found = []
    for trace in traces:
        units = [r["unit"] for r in trace.records if r["op"] == OpKind.UNIT]
        seen: set[str] = set()
        for record, place in walk(trace.records):
            if record["op"] != OpKind.HOOK or record["point"] != "pre_forward":
                continue
            module = record["module"]
            owner = max((u for u in units if _is_within(module, u)), key=len, default=None)
            if owner is None or owner == record["unit"] or module in seen:
                continue
            seen.add(module)
            found.append(
                Violation(
                    rule="I15",
                    rank=trace.rank,
                    message=f"The hook of {module} gathers unit {unit_label(record['unit'])}, and "
                    f"its parameters belong to unit {unit_label(owner)}.",
                    unit=unit_label(owner),
                    node=place.node,
                    microbatch=place.microbatch,
                    hook=place.hook,
                    seq=record["seq"],
                )
            )
    return found


def _is_within(module: str, unit: str) -> bool:
    return not unit or module == unit or module.startswith(f"{unit}.")


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


def check_reduce_inputs(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the bytes of each packed reduce input with the largest layer and parameter."""
    found = []
    for trace in traces:
        most = max(
            (
                r["bytes"] if r["op"] == OpKind.UNIT else 2 * math.prod(r["shape"])
                for r in trace.records
                if r["op"] == OpKind.PARAMETER
                or (r["op"] == OpKind.UNIT and r["unit"].startswith("decoder.layers."))
            ),
            default=0,
        )
        seen: set[str] = set()
        for record, place in walk(trace.records):
            if record["op"] != OpKind.COLLECTIVE or record["kind"] != "reduce_scatter":
                continue
            unit = record["unit"]
            if unit is None or unit in seen or record["bytes"] <= most:
                continue
            seen.add(unit)
            found.append(
                Violation(
                    rule="I20",
                    rank=trace.rank,
                    message=f"Expected reduce inputs of at most {most} bytes, the largest layer "
                    f"or parameter, got {record['bytes']}.",
                    unit=unit_label(unit),
                    node=place.node,
                    microbatch=place.microbatch,
                    seq=record["seq"],
                )
            )
    return found


def check_kept_gradients(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for full gradients of one unit that live on when another unit is complete.

    Gradients are named "full gradient" in the trace when their unit is complete.
    """
    found = []
    for trace in traces:
        live: dict[int, str] = {}
        reported: set[str] = set()
        for record, place in walk(trace.records):
            if record["op"] == OpKind.FREE:
                live.pop(record["storage"], None)
            elif record["op"] == OpKind.NAME and record["name"].endswith(":full gradient"):
                unit = record["name"].partition(":")[0]
                for kept in sorted(set(live.values()) - {unit} - reported):
                    reported.add(kept)
                    found.append(
                        Violation(
                            rule="I20",
                            rank=trace.rank,
                            message=f"The full gradients of unit {unit_label(kept)} are kept when "
                            f"unit {unit_label(unit)} is complete.",
                            unit=unit_label(kept),
                            node=place.node,
                            microbatch=place.microbatch,
                            seq=record["seq"],
                        )
                    )
                live[record["storage"]] = unit
    return found


def check_norms(outputs: Sequence[JobOutput], references: Sequence[JobOutput]) -> list[Violation]:
    """Compares the first step's gradient norm on each rank with the reference's."""
    found = []
    for rank, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        norm, expected = output.steps[0].grad_norm, reference.steps[0].grad_norm
        first = outputs[0].steps[0].grad_norm
        message = None
        if not math.isclose(norm, expected, rel_tol=MAX_GRAD_NORM_REL_ERROR):
            message = f"Expected a gradient norm of {expected:.6g}, got {norm:.6g}."
        elif norm != first:
            message = f"Expected one gradient norm on all ranks, got {norm!r} and {first!r}."
        if message is not None:
            found.append(Violation(rule="I14", rank=rank, message=message))
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


def check_equal(weights: Sequence[Mapping[str, torch.Tensor]]) -> list[Violation]:
    """Compares every rank's weights with rank 0's, by full name."""
    found = []
    for rank, mine in enumerate(weights):
        for name, weight in mine.items():
            if not torch.equal(weight, weights[0][name]):
                found.append(
                    Violation(
                        rule="init",
                        rank=rank,
                        message=f"{name} starts with other values than on rank 0.",
                        unit=name.rpartition(".")[0],
                    )
                )
    return found


def check_budget(rank: int, calls: Mapping[tuple[str, str], int], most: int) -> list[Violation]:
    """Compares the calls of Python functions that each hook costs, by hook and unit, with a budget.

    Calls and not seconds: they are the same on every machine and in every run.
    """
    return [
        Violation(
            rule="budget",
            rank=rank,
            message=f"Expected a hook of at most {most} calls, got {count}.",
            unit=unit_label(unit),
            hook=hook,
        )
        for (hook, unit), count in calls.items()
        if count > most
    ]
