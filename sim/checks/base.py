"""What a check finds, and the place in the schedule where it was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from real.trace import OpKind, Trace
from real.trace.recorder import Record


class Access(NamedTuple):
    """One use of a storage.

    Attributes:
        seq: Number of the record.
        stream: The stream it runs on.
        what: What it does, as "mm reads" or "all_gather writes".
    """

    seq: int
    stream: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (record {self.seq}, stream {self.stream})"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule.

    Attributes:
        rule: The invariant, I1 to I21.
        rank: The rank that broke it.
        message: What is wrong, in one sentence.
        unit: FSDP unit, if known; the root is "<root>".
        node: Schedule node, as "mlp backward of layer 2", if known.
        microbatch: Microbatch of that node, if known.
        first: The earlier access, if two are in conflict.
        second: The later access.
        missing: The order that is missing between them.
        hook: The hook that ran last before, as "pre_forward of decoder.layers.0", if known.
        seq: Number of the record at which it was noticed.
    """

    rule: str
    rank: int
    message: str
    unit: str | None = None
    node: str | None = None
    microbatch: int | None = None
    first: Access | None = None
    second: Access | None = None
    missing: str | None = None
    hook: str | None = None
    seq: int | None = None

    def __str__(self) -> str:
        places = [
            f"rank {self.rank}",
            *([f"unit {self.unit}"] if self.unit is not None else []),
            *([f"node {self.node}"] if self.node is not None else []),
            *([f"microbatch {self.microbatch}"] if self.microbatch is not None else []),
            *([f"record {self.seq}"] if self.seq is not None else []),
        ]
        lines = [f"{self.rule}: {self.message}", f"  at {', '.join(places)}"]
        if self.first is not None:
            lines.append(f"  first:  {self.first}")
        if self.second is not None:
            lines.append(f"  second: {self.second}")
        if self.missing is not None:
            lines.append(f"  missing: {self.missing}")
        if self.hook is not None:
            lines.append(f"  after hook: {self.hook}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the violation as plain data."""
        return asdict(self)


class Check(Protocol):
    """A pure function over the traces of all ranks."""

    def __call__(self, traces: Sequence[Trace]) -> list[Violation]:
        """Returns what is broken; empty when nothing is."""
        ...


def unit_label(name: str | None) -> str | None:
    """Returns a unit's name for readers."""
    return "<root>" if name == "" else name


@dataclass
class Place:
    """Where in the schedule a record is.

    Attributes:
        step: Optimizer step, or None before the first.
        node: Innermost schedule node, or None.
        microbatch: Its microbatch.
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


def walk(trace: Trace) -> Iterator[tuple[Record, Place]]:
    """Yields every record with its place; the place object is one and changes as it goes."""
    place = Place()
    for record in trace.records:
        op = record["op"]
        if op == OpKind.NODE:
            layer = record["layer"]
            of = f" of {layer}" if layer is not None else ""
            place.nodes.append(
                (f"{record['name']} {record['direction']}{of}", record["microbatch"])
            )
            place.hook = None
        elif op == OpKind.STEP and record["event"] == "begin":
            place.step = record["step"]
        elif op == OpKind.HOOK:
            place.hook = f"{record['point']} of {record['module'] or '<root>'}"
        yield record, place
        if op == OpKind.NODE_END and place.nodes:
            place.nodes.pop()
            place.hook = None
