"""I11: on every communicator all ranks call the same collectives in the same order.

Kind and unit have to agree, and element type and size where the collective asks for it: exchanges
and gathers of uneven parts do not. Messages are matched per pair and direction. The counting part
of I12 is here for whole communicators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import unit_or_none
from real.trace.recorder import Record
from sim.checks.base import Access, Reporter, Violation
from sim.checks.rules import SEVERAL_RANKS, Judges, records_of

_MESSAGES: Final = ("send", "recv")
_EQUAL_SIZES: Final = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"}
)

Members = tuple[int, ...]

JUDGES: Final = tuple(
    Judges(rule, (records_of(OpKind.COLLECTIVE), SEVERAL_RANKS)) for rule in ("I11", "I12")
)


def check_collectives(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the ranks of each group call by call; reports a group's first difference."""
    reporters = {trace.rank: Reporter(trace) for trace in traces}
    calls: dict[tuple[str, Members], dict[int, list[Record]]] = {}
    messages: dict[tuple[str, int, int], dict[str, list[Record]]] = {}
    for trace in traces:
        members: dict[str, Members] = {}
        for record in trace.lean_records:
            op = record["op"]
            if op == OpKind.GROUP:
                members[record["group"]] = tuple(record["ranks"])
                calls.setdefault((record["group"], members[record["group"]]), {})[trace.rank] = []
            elif op == OpKind.COLLECTIVE:
                if record["kind"] in _MESSAGES:
                    pair = _pair(record, trace.rank)
                    by_kind = messages.setdefault(pair, {kind: [] for kind in _MESSAGES})
                    by_kind[record["kind"]].append(record)
                else:
                    key = (record["group"], members.get(record["group"], ()))
                    calls.setdefault(key, {}).setdefault(trace.rank, []).append(record)
    # A trace that was cut short lacks the partners of calls that others still made.
    whole = {trace.rank for trace in traces if trace.is_complete}
    for (group, _), by_rank in sorted(calls.items()):
        _compare_ranks(group, by_rank, reporters, whole)
    for pair, by_kind in sorted(messages.items()):
        _compare_messages(pair, by_kind, reporters, whole)
    return [violation for reporter in reporters.values() for violation in reporter.found]


def _pair(record: Record, rank: int) -> tuple[str, int, int]:
    """Group, sender and receiver of a message; -1 where the trace does not say."""
    peer = record.get("peer", -1)
    is_send = record["kind"] == "send"
    return record["group"], rank if is_send else peer, peer if is_send else rank


def _compare_ranks(
    group: str,
    by_rank: dict[int, list[Record]],
    reporters: dict[int, Reporter],
    whole: Collection[int],
) -> None:
    other_rank, other = min(by_rank.items())
    for rank, mine in sorted(by_rank.items()):
        for a, b in zip(mine, other, strict=False):
            differences = list(_differences(a, b))
            if differences:
                reporters[rank].report(
                    "I11",
                    f"Call {a['n']} of group {group} is {_text(a, differences)} here and "
                    f"{_text(b, differences)} on rank {other_rank}.",
                    unit=unit_or_none(a),
                    first=_access(b, other_rank, reporters),
                    second=_access(a, rank, reporters),
                )
                return
        shorter = rank if len(mine) < len(other) else other_rank
        if len(mine) != len(other) and shorter in whole:
            longer = max((mine, rank), (other, other_rank), key=lambda side: len(side[0]))
            extra = longer[0][min(len(mine), len(other))]
            reporters[rank].report(
                "I12",
                f"Group {group} has {len(mine)} calls here and {len(other)} on rank {other_rank}; "
                f"the first that has no partner is {_text(extra, [])}.",
                unit=unit_or_none(extra),
                first=_access(extra, longer[1], reporters),
            )
            return


def _differences(a: Record, b: Record) -> Iterator[str]:
    """Yields the fields in which two calls that meet must agree and do not."""
    if (a["kind"], unit_or_none(a)) != (b["kind"], unit_or_none(b)):
        yield "kind"
    elif a["kind"] != "barrier":
        if a["dtype"] != b["dtype"]:
            yield "dtype"
        if a["bytes"] != b["bytes"] and a["kind"] in _EQUAL_SIZES:
            yield "bytes"


def _compare_messages(
    pair: tuple[str, int, int],
    by_kind: dict[str, list[Record]],
    reporters: dict[int, Reporter],
    whole: Collection[int],
) -> None:
    group, source, target = pair
    if source not in reporters or target not in reporters:
        return  # a trace that does not name the other rank
    for sent, received in zip_longest(by_kind["send"], by_kind["recv"]):
        if sent is None or received is None:
            if (source if sent is None else target) not in whole:
                return
            rank = target if sent is None else source
            record = received if sent is None else sent
            reporters[rank].report(
                "I11",
                f"Message {record['n']} from rank {source} to rank {target} in group {group} is "
                f"{'received and never sent' if sent is None else 'sent and never received'}.",
                unit=unit_or_none(record),
                second=_access(record, rank, reporters),
            )
            return
        if (sent["bytes"], sent["dtype"]) != (received["bytes"], received["dtype"]):
            reporters[target].report(
                "I11",
                f"Message {sent['n']} from rank {source} to rank {target} in group {group} is sent "
                f"as {sent['bytes']} bytes of {sent['dtype']} and received as "
                f"{received['bytes']} bytes of {received['dtype']}.",
                unit=unit_or_none(received),
                first=_access(sent, source, reporters),
                second=_access(received, target, reporters),
            )
            return


def _access(record: Record, rank: int, reporters: dict[int, Reporter]) -> Access:
    return reporters[rank].access(
        record["seq"], record["stream"], f"{_text(record, ['bytes'])} on rank {rank}"
    )


def _text(record: Record, differences: Sequence[str]) -> str:
    unit = unit_or_none(record)
    text = str(record["kind"]) + (f" of unit {unit}" if unit is not None else "")
    if "dtype" in differences or "bytes" in differences:
        text += f" with {record['bytes']} bytes of {record['dtype']}"
    return text
