"""What a check finds, and how it says where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from real.trace import Trace
from real.trace.read import Place, Places, UnitKey, stream_roles


class Access(NamedTuple):
    """One use of a storage.

    Attributes:
        seq: Number of the record.
        stream: The stream it runs on; a negative one is a communicator's own.
        what: What it does, as "mm reads" or "all_gather of layers.0 writes".
        on: The stream in words, as "stream 2 (all-gather)".
        where: Node, microbatch and hook in words, if known.
    """

    seq: int
    stream: int
    what: str
    on: str | None = None
    where: str | None = None

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"{self.what} (record {self.seq}, {self.on or f'stream {self.stream}'}{place})"


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
        replay: The command that repeats the run, if known.
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
    replay: str | None = None

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
        if self.replay is not None:
            lines.append(f"  replay: {self.replay}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the violation as plain data."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("first", "second"):
            if values[name] is not None:
                values[name] = values[name]._asdict()
        return values


class Check(Protocol):
    """A pure function over the traces of all ranks."""

    def __call__(self, traces: Sequence[Trace]) -> list[Violation]:
        """Returns what is broken; empty when nothing is."""
        ...


def unit_label(unit: UnitKey | str | None) -> str | None:
    """Returns a unit's name for readers."""
    return str(unit) if isinstance(unit, UnitKey) else "<root>" if unit == "" else unit


class Reporter:
    """Collects the violations of one rank, each with its place.

    Args:
        trace: The rank's trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.found: list[Violation] = []
        self._trace = trace
        self._roles: dict[int, str] | None = None
        self._places: Places | None = None

    def report(
        self,
        rule: str,
        message: str,
        *,
        unit: UnitKey | str | None = None,
        seq: int | None = None,
        first: Access | None = None,
        second: Access | None = None,
        missing: str | None = None,
    ) -> None:
        """Adds one violation. `seq`, or the second access's, says where it was noticed."""
        if seq is None and second is not None:
            seq = second.seq
        place = Place() if seq is None else self.place_at(seq)
        self.found.append(
            Violation(
                rule=rule,
                rank=self._trace.rank,
                message=message,
                unit=unit_label(unit),
                node=place.node,
                microbatch=place.microbatch,
                first=first,
                second=second,
                missing=missing,
                hook=place.hook,
                seq=seq,
            )
        )

    def access(self, seq: int, stream: int, what: str, on: str | None = None) -> Access:
        """Returns an access with its stream and its place in words."""
        return Access(
            seq,
            stream,
            what,
            on=on or self.stream(stream),
            where=str(self.place_at(seq)) or None,
        )

    def stream(self, stream: int) -> str:
        """Returns a stream in words: "stream 2 (all-gather)"."""
        if self._roles is None:
            self._roles = stream_roles(self._trace)
        role = self._roles.get(stream)
        return f"stream {stream}" + (f" ({role})" if role is not None else "")

    def place_at(self, seq: int) -> Place:
        """Returns the place of a record. The first question costs a walk over the trace."""
        if self._places is None:
            self._places = Places(self._trace)
        return self._places.at(seq)
