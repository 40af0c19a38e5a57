"""I15: each parameter has one owner, the nearest enclosing unit, on the ranks that share it.

And the declared part of I14: gradients of experts are divided by the number of expert-parallel
ranks, because their mesh averages over the ranks of equal experts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.checks.base import Reporter, Violation, unit_label
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
    units: dict[str, Record] = {}
    parameters: list[Record] = []
    for record in trace.lean_records:
        op = record["op"]
        if op == OpKind.UNIT:
            units[record["unit"]] = record
        elif op == OpKind.PARAMETER:
            parameters.append(record)
        elif op == OpKind.REMOVE:
            _judge(trace, reporter, units, parameters)
            units, parameters = {}, []
    _judge(trace, reporter, units, parameters)
    return reporter.found


def _judge(
    trace: Trace, reporter: Reporter, units: dict[str, Record], parameters: list[Record]
) -> None:
    owners: dict[str, Record] = {}
    first_name: dict[str, str] = {}
    for record in parameters:
        name, unit = record["parameter"], record["unit"]
        seq = record["seq"]
        nearest = _nearest_unit(name, units)
        if unit is None:
            reporter.report("I15", f"Parameter {name} has no owner.", seq=seq)
        elif unit != nearest:
            reporter.report(
                "I15",
                f"Expected parameter {name} in its nearest unit {unit_label(nearest)}, got it in "
                f"{unit_label(unit)}.",
                unit=unit,
                seq=seq,
            )
        earlier = owners.setdefault(name, record)
        if earlier is not record:
            reporter.report(
                "I15",
                f"Parameter {name} has two owners, {unit_label(earlier['unit'])} and "
                f"{unit_label(unit)}.",
                unit=unit,
                seq=seq,
            )
        for alias in record["names"]:
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


def _nearest_unit(parameter: str, units: dict[str, Record]) -> str | None:
    enclosing = [unit for unit in units if not unit or parameter.startswith(f"{unit}.")]
    return max(enclosing, key=len, default=None)


def _judge_mesh(trace: Trace, reporter: Reporter, unit: str, record: Record) -> None:
    ranks = record.get("ranks")
    if not ranks:
        return
    size = int(trace.scenario.get("expert_model_parallel_size", 1))
    is_expert = unit.endswith(".experts")
    expected = [
        rank for rank in range(trace.world_size) if not is_expert or (rank - trace.rank) % size == 0
    ]
    if sorted(ranks) != expected:
        reporter.report(
            "I15",
            f"Expected unit {unit_label(unit)} on the {'expert' if is_expert else 'dense'} mesh of "
            f"ranks {_listed(expected)}, got ranks {_listed(ranks)}.",
            unit=unit,
            seq=record["seq"],
        )
    divisor = size if is_expert else 1
    if record.get("divisor", divisor) != divisor:
        reporter.report(
            "I14",
            f"Expected gradients of unit {unit_label(unit)} divided by {divisor} before they are "
            f"reduced, got {record['divisor']}.",
            unit=unit,
            seq=record["seq"],
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
