"""Rewrites of a trace that put the same work on other streams, communicators and events.

Records keep their numbers, so that everything that refers to one still does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from real.trace import Trace
from real.trace.recorder import Record
from sim.timing.replay.program import ReplayError

RECORDED: Final = "recorded"
STREAMS: Final = (RECORDED, "unified", "separate")
COMMUNICATORS: Final = (RECORDED, "shared", "separate")
EVENTS: Final = (RECORDED, "shared", "per_direction")

_REDUCTIONS: Final = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What to change.

    Attributes:
        streams: "unified" runs units' reductions on the stream of their gathers.
        communicators: "separate" gives units' reductions communicators of their own.
        events: "shared" makes every schedule node wait for the newest node of either direction, as
            with one event for all; "per_direction" for the newest of its own microbatch and
            direction.
    """

    streams: str = RECORDED
    communicators: str = RECORDED
    events: str = RECORDED

    def apply(self, traces: Sequence[Trace]) -> list[Trace]:
        """Returns the traces, rewritten.

        Raises:
            ReplayError: The trace has together what should be separate.
        """
        return [replace(trace, records=self._records(trace)) for trace in traces]

    def _records(self, trace: Trace) -> list[Record]:
        records = trace.records
        if self.streams != RECORDED:
            records = _with_streams(records, is_unified=self.streams == "unified")
        if self.communicators == "shared":
            _expect_shared(records)
        elif self.communicators == "separate":
            records = _with_own_communicators(records)
        if self.events != RECORDED:
            records = _with_events(records, is_shared=self.events == "shared")
        return records


def _unit_stream(records: Sequence[Record], kinds: tuple[str, ...]) -> int | None:
    found = Counter(
        record["stream"]
        for record in records
        if record["op"] == "collective" and record["unit"] is not None and record["kind"] in kinds
    )
    return found.most_common(1)[0][0] if found else None


def _with_streams(records: list[Record], *, is_unified: bool) -> list[Record]:
    gathers = _unit_stream(records, ("all_gather",))
    reductions = _unit_stream(records, _REDUCTIONS)
    if gathers is None or reductions is None:
        return records
    if not is_unified:
        if gathers == reductions:
            raise ReplayError(
                "Expected a trace with gathers and reductions on separate streams, got one with "
                "both on one stream; record it again with separate streams."
            )
        return records
    return [
        {
            key: gathers if key in ("stream", "on") and value == reductions else value
            for key, value in record.items()
        }
        if _names_stream(record, reductions)
        else record
        for record in records
    ]


def _names_stream(record: Record, stream: int) -> bool:
    # The record of a host wait names an event by number, unless it waits for a stream.
    if record["op"] == "host_sync":
        return bool(record["what"] == "stream" and record["on"] == stream)
    return record.get("stream") == stream or record.get("on") == stream


def _expect_shared(records: Sequence[Record]) -> None:
    groups: dict[str, set[str]] = {"all_gather": set(), "reduce_scatter": set()}
    for record in records:
        if record["op"] == "collective" and record["unit"] is not None:
            groups.get(record["kind"], set()).add(record["group"])
    if groups["all_gather"] and not groups["reduce_scatter"] <= groups["all_gather"]:
        raise ReplayError(
            "Expected a trace with gathers and reductions on shared communicators, got one with "
            "separate ones; record it again with shared communicators."
        )


def _with_own_communicators(records: list[Record]) -> list[Record]:
    moved = {
        (record["group"], record["n"])
        for record in records
        if record["op"] == "collective"
        and record["unit"] is not None
        and record["kind"] in _REDUCTIONS
    }
    return [
        {**record, "group": f"{record['group']}#reductions"}
        if "n" in record and (record["group"], record["n"]) in moved
        else record
        for record in records
    ]


def _with_events(records: list[Record], *, is_shared: bool) -> list[Record]:
    """Lets the wait with which a schedule node begins refer to another record."""
    schedule_events = _schedule_events(records)
    nodes: list[Record] = []
    newest: int | None = None
    newest_of: dict[tuple[int | None, str], int] = {}
    result = []
    for place, record in enumerate(records):
        op = record["op"]
        if op == "node":
            nodes.append(record)
        elif op == "node_end" and nodes:
            nodes.pop()
        elif op == "event_record" and nodes and record["event"] in schedule_events:
            newest = record["seq"]
            node = nodes[-1]
            newest_of[node["microbatch"], node["direction"]] = record["seq"]
        elif op == "event_wait" and nodes and records[place - 1] is nodes[-1]:
            node = nodes[-1]
            own = newest_of.get((node["microbatch"], node["direction"]))
            target = newest if is_shared else own
            if target is not None:
                record = {**record, "record": target}
        result.append(record)
    return result


def _schedule_events(records: Sequence[Record]) -> set[int]:
    """Returns the events that nodes wait for when they begin."""
    return {
        record["event"]
        for before, record in pairwise(records)
        if record["op"] == "event_wait" and before["op"] == "node"
    }
