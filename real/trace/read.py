"""How a trace is read: units by their key, steps and places, stream roles, what was declared.

Every reader of traces needs to know where in the schedule a record is and which unit it is about.
Here that is said once, for the checks and for whoever else reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from real.trace.jsonl import Trace
from real.trace.record import OpKind
from real.trace.recorder import Record
from real.trace.typed import Name, StreamRole, Unit, select

_PLACED: Final = frozenset({OpKind.NODE, OpKind.NODE_END, OpKind.STEP, OpKind.HOOK})
"""Records that say where in the schedule the next ones are."""


# -- units ------------------------------------------------------------------------------------


class UnitKey(NamedTuple):
    """What tells a unit, or one of its parameters, from all others of a rank.

    Attributes:
        chunk: The model chunk, 0 where there is only one: two chunks of a pipeline both have a
            "decoder.layers.0".
        name: Its name in the chunk; "" is the root.
    """

    chunk: int
    name: str

    def __str__(self) -> str:
        name = self.name or "<root>"
        return f"{name} of chunk {self.chunk}" if self.chunk else name

    def beside(self, name: str) -> UnitKey:
        """Returns the key of something else in the same chunk."""
        return UnitKey(self.chunk, name)


def unit_key(record: Mapping[str, Any]) -> UnitKey:
    """Returns the unit of a record that has one."""
    return UnitKey(record.get("chunk", 0), record["unit"])


def unit_or_none(record: Mapping[str, Any]) -> UnitKey | None:
    """Returns the unit of a record, None for a call or a parameter without one."""
    return None if record["unit"] is None else unit_key(record)


def declared_units(trace: Trace) -> dict[UnitKey, Unit]:
    """Returns the newest declaration of each unit."""
    return {unit_key(record): record for record in select(trace.lean_records, Unit)}


class Named(NamedTuple):
    """What a storage holds.

    Attributes:
        unit: The unit it belongs to.
        kind: What of it, as "full weight".
    """

    unit: UnitKey
    kind: str

    def __str__(self) -> str:
        return f"the {self.kind} of unit {self.unit}"


def named_of(record: Mapping[str, Any]) -> Named:
    """Returns what a record names its storage."""
    return Named(unit_key(record), record["kind"])


def named_storages(trace: Trace) -> dict[int, Named]:
    """Returns what each named storage holds, as it was named last."""
    return {named["storage"]: named_of(named) for named in select(trace.lean_records, Name)}


def bound(trace: Trace, name: str) -> int | None:
    """Returns a bound that the target declared in the header, or None.

    "unsharded" is the most units that are unsharded at once, "reductions" how often each unit is
    reduced in a step.
    """
    bounds: dict[str, int] = trace.header.get("bounds", {})
    return bounds.get(name)


# -- streams ----------------------------------------------------------------------------------


def stream_roles(trace: Trace) -> dict[int, str]:
    """Returns what each stream is for, as far as the trace says."""
    roles: dict[int, str] = {}
    for record in select(trace.lean_records, StreamRole):
        roles.setdefault(record["stream"], record["role"])
    return roles


# -- places -----------------------------------------------------------------------------------


@dataclass
class Place:
    """Where in the schedule a record is.

    Attributes:
        step: Optimizer step, or None before the first.
        nodes: Open schedule nodes with their microbatches, outermost first.
        hook: The newest hook inside the node.
    """

    step: int | None = None
    nodes: list[tuple[str, int | None]] = field(default_factory=list)
    hook: str | None = None

    @property
    def node(self) -> str | None:
        """The innermost node."""
        return self.nodes[-1][0] if self.nodes else None

    @property
    def microbatch(self) -> int | None:
        """The innermost node's microbatch."""
        return self.nodes[-1][1] if self.nodes else None

    def __str__(self) -> str:
        parts = [
            *([self.node] if self.node is not None else []),
            *([f"microbatch {self.microbatch}"] if self.microbatch is not None else []),
            *([f"after {self.hook}"] if self.hook is not None else []),
        ]
        return ", ".join(parts)

    def enter(self, record: Record) -> None:
        """Takes a record into account before it is judged."""
        op = record["op"]
        if op == OpKind.NODE:
            layer = record["layer"]
            of = f" of {layer}" if layer is not None else ""
            self.nodes.append((f"{record['name']} {record['direction']}{of}", record["microbatch"]))
            self.hook = None
        elif op == OpKind.STEP and record["event"] == "begin":
            self.step = record["step"]
        elif op == OpKind.HOOK:
            self.hook = f"{record['point']} of {record['module'] or '<root>'}"

    def leave(self, record: Record) -> None:
        """Takes a record into account after it was judged."""
        if record["op"] == OpKind.NODE_END and self.nodes:
            self.nodes.pop()
            self.hook = None


def walk(records: Sequence[Record]) -> Iterator[tuple[Record, Place]]:
    """Yields every record with its place; the place object is one and changes as it goes."""
    place = Place()
    for record in records:
        if record["op"] in _PLACED:
            place.enter(record)
            yield record, place
            place.leave(record)
        else:
            yield record, place


def only(trace: Trace, ops: frozenset[OpKind]) -> list[Record]:
    """Returns the records of some operations, and those that say where they are."""
    wanted = ops | _PLACED
    return [record for record in trace.lean_records if record["op"] in wanted]


class Places:
    """Where each record of a trace is, by its number.

    Args:
        trace: One rank's trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._seqs: list[int] = []
        self._places: list[Place] = []
        walked = Place()
        for record in trace.lean_records:
            walked.enter(record)
            self._add(record["seq"], walked)
            walked.leave(record)
            if record["op"] == OpKind.NODE_END:
                self._add(record["seq"] + 1, walked)

    def _add(self, seq: int, place: Place) -> None:
        self._seqs.append(seq)
        self._places.append(replace(place, nodes=place.nodes[-1:]))

    def at(self, seq: int) -> Place:
        """Returns the place of a record."""
        index = bisect_right(self._seqs, seq) - 1
        return self._places[index] if index >= 0 else Place()
