"""I11: on every communicator all ranks call the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.checks.base import Violation, unit_label

_POINT_TO_POINT = ("send", "recv")


def check_collectives(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the ranks of each group call by call; reports a group's first difference."""
    found: list[Violation] = []
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[Record]]] = {}
    for trace in traces:
        members: dict[str, tuple[int, ...]] = {}
        for record in trace.records:
            if record["op"] == OpKind.GROUP:
                members[record["group"]] = tuple(record["ranks"])
                calls.setdefault((record["group"], members[record["group"]]), {})[trace.rank] = []
            elif record["op"] == OpKind.COLLECTIVE and record["kind"] not in _POINT_TO_POINT:
                key = (record["group"], members.get(record["group"], ()))
                calls.setdefault(key, {}).setdefault(trace.rank, []).append(record)
    for (group, _), by_rank in sorted(calls.items()):
        reference_rank, reference = min(by_rank.items())
        for rank, mine in sorted(by_rank.items()):
            violation = _first_difference(group, rank, mine, reference_rank, reference)
            if violation is not None:
                found.append(violation)
                break
    return found


def _first_difference(
    group: str, rank: int, mine: list[Record], other_rank: int, other: list[Record]
) -> Violation | None:
    for a, b in zip(mine, other, strict=False):
        if (a["kind"], a["unit"]) != (b["kind"], b["unit"]):
            return Violation(
                rule="I11",
                rank=rank,
                message=f"Call {a['n']} of group {group} is {_call(a)} here and {_call(b)} on "
                f"rank {other_rank}.",
                unit=unit_label(a["unit"]),
                seq=a["seq"],
            )
    if len(mine) != len(other):
        return Violation(
            rule="I12",
            rank=rank,
            message=f"Group {group} has {len(mine)} calls here and {len(other)} on "
            f"rank {other_rank}.",
        )
    return None


def _call(record: Record) -> str:
    unit = unit_label(record["unit"])
    return str(record["kind"]) + (f" of unit {unit}" if unit is not None else "")
