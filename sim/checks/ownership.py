"""I15: each parameter has one owner, the nearest enclosing unit, on the ranks that share it.

And the declared part of I14: gradients of experts are divided by the number of expert-parallel
ranks, because their mesh averages over the ranks of equal experts only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key, unit_or_none
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation
from sim.checks.rules import DIVISORS, Judges, records_of

JUDGES: Final = (
    Judges("I14", (DIVISORS,)),
    Judges("I15", (records_of(OpKind.UNIT), records_of(OpKind.PARAMETER))),
)


def check_ownership(traces: Sequence[Trace]) -> list[Violation]:
    """Checks what every rank declared when its hooks were installed."""
    return [violation for trace in traces for violation in _check_rank(trace)]


def _check_rank(trace: Trace) -> list[Violation]:
    reporter = Reporter(trace)
    units: dict[UnitKey, Record] = {}
    parameters: list[Record] = []
    for record in trace.lean_records:
        op = record["op"]
        if op == OpKind.UNIT:
            units[unit_key(record)] = record
        elif op == OpKind.PARAMETER:
            parameters.append(record)
        elif op == OpKind.REMOVE:
            _judge(trace, reporter, units, parameters)
            units, parameters = {}, []
    _judge(trace, reporter, units, parameters)
    return reporter.found


def _judge(
    trace: Trace, reporter: Reporter, units: dict[UnitKey, Record], parameters: list[Record]
) -> None:
    owners: dict[UnitKey, Record] = {}
    first_name: dict[UnitKey, UnitKey] = {}
    for record in parameters:
        unit = unit_or_none(record)
        name = unit_key(record).beside(record["parameter"])
        seq = record["seq"]
        nearest = _nearest_unit(name, units)
        if unit is None:
            reporter.report("I15", f"Parameter {name} has no owner.", seq=seq)
        elif units and unit != nearest:  # with no unit declared, I15 is told as not judged
            reporter.report(
                "I15",
                f"Expected parameter {name} in its nearest unit {nearest}, got it in {unit}.",
                unit=unit,
                seq=seq,
            )
        earlier = owners.setdefault(name, record)
        if earlier is not record:
            reporter.report(
                "I15",
                f"Parameter {name} has two owners, {unit_or_none(earlier)} and {unit}.",
                unit=unit,
                seq=seq,
            )
        for alias in map(name.beside, record["names"]):
            if first_name.setdefault(alias, name) != name:
                reporter.report(
                    "I15",
                    f"Expected {first_name[alias]} and {name} to be one parameter, since they are "
                    "tied, got two.",
                    unit=unit,
                    seq=seq,
                )
                break
    for unit_name, record in units.items():
        _judge_mesh(trace, reporter, unit_name, record)


def _nearest_unit(parameter: UnitKey, units: Iterable[UnitKey]) -> UnitKey | None:
    enclosing = [
        unit
        for unit in units
        if unit.chunk == parameter.chunk
        and (not unit.name or parameter.name.startswith(f"{unit.name}."))
    ]
    return max(enclosing, key=lambda unit: len(unit.name), default=None)


def _judge_mesh(trace: Trace, reporter: Reporter, unit: UnitKey, record: Record) -> None:
    ranks = record.get("ranks")
    if not ranks:
        return
    size = int(trace.scenario.get("expert_model_parallel_size", 1))
    is_expert = unit.name.endswith(".experts")
    expected = [
        rank for rank in range(trace.world_size) if not is_expert or (rank - trace.rank) % size == 0
    ]
    if sorted(ranks) != expected:
        reporter.report(
            "I15",
            f"Expected unit {unit} on the {'expert' if is_expert else 'dense'} mesh of "
            f"ranks {_listed(expected)}, got ranks {_listed(ranks)}.",
            unit=unit,
            seq=record["seq"],
        )
    divisor = size if is_expert else 1
    if record.get("divisor", divisor) != divisor:
        reporter.report(
            "I14",
            f"Expected gradients of unit {unit} divided by {divisor} before they are "
            f"reduced, got {record['divisor']}.",
            unit=unit,
            seq=record["seq"],
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
