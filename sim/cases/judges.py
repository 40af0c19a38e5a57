"""Rules that some cases need beside the checks of every trace, each with a name of its own.

* I13, `check_last`: the flag for the last microbatch, read at each reduction, is true for the last
  reduction of a unit's window and for no other.
* I15, `check_demand`: a hook gathers the nearest unit around its module.
* I14, `check_norms`: the gradient norm is the reference's, and one number on all ranks.
* I11, `both_sides`: ranks that met in different calls, each with its own unit.
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
from real.trace.read import Place, walk
from real.trace.recorder import Record
from sim.cases.worlds import Outcome
from sim.checks import Violation
from sim.checks.base import unit_label
from sim.world import MismatchError

if TYPE_CHECKING:
    from real.output import JobOutput


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
