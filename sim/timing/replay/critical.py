"""The critical path: the chain of work that makes a step as long as it is.

It is followed from the end of the step back to its start. What ran until now either followed the
operation before it on its stream, or a record that it waited for, or the host that issued it; a
collective began when its last rank came, or when the one before it on its communicator ended. So
every nanosecond of the step is in exactly one item of the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from real.trace.recorder import Record
from sim.timing.costs.collectives import is_all_to_all
from sim.timing.costs.kernels import kernel_class
from sim.timing.replay.hostwork import HostWork
from sim.timing.replay.program import COLLECTIVE, KERNEL, RECORD
from sim.timing.replay.timeline import Replay

_HOST_WORDS = {
    "kernel": "kernel launches",
    "collective": "collective launches",
    "unshard": "unshard",
    "reshard": "reshard",
    "reduce": "reduce",
    "hook": "hooks",
    "host_sync": "host waits",
    "allocate": "memory",
    "free": "memory",
    "resize": "memory",
    "record_stream": "memory",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One stretch of the path.

    Attributes:
        rank: The rank that works.
        lane: "compute", "communication" or "host".
        what: What it does, as "mlp backward: matrix" or "reduce".
        start: When, in nanoseconds.
        end: Until when.
        seq: The record, or None for several.
    """

    rank: int
    lane: str
    what: str
    start: int
    end: int
    seq: int | None


class Group(NamedTuple):
    """All stretches of the path that do the same.

    Attributes:
        lane: "compute", "communication" or "host".
        what: What they do.
        ns: How long they are together.
        num_items: How many they are.
    """

    lane: str
    what: str
    ns: int
    num_items: int


def critical_path(replay: Replay) -> list[Item]:
    """Returns the path from the start of the step to its end."""
    items = list(_Path(replay).walk())
    items.reverse()
    return items


def by_kind(items: list[Item]) -> list[Group]:
    """Returns the path's content, largest first."""
    lengths: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        lengths[item.lane, item.what] += item.end - item.start
        counts[item.lane, item.what] += 1
    groups = [Group(*key, ns, counts[key]) for key, ns in lengths.items()]
    return sorted(groups, key=lambda group: (-group.ns, group.lane, group.what))


def lane_share(items: list[Item], lane: str) -> float:
    """Returns which share of the path is on a lane."""
    whole = sum(item.end - item.start for item in items)
    part = sum(item.end - item.start for item in items if item.lane == lane)
    return part / whole if whole else 0.0


class _Op(NamedTuple):
    """An operation: its rank's and its own place in the program."""

    rank: int
    stream: int
    place: int


class _Path:
    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._times = replay.times
        self._program = replay.times.program
        self._index = {each.rank: i for i, each in enumerate(self._program.ranks)}
        self._marks: dict[int, dict[int, _Op]] = {}
        self._labels: dict[int, dict[int, tuple[Record, str]]] = {}
        self._parts: dict[tuple[int, int], _Op] = {}
        self._is_indexed: set[int] = set()
        self._segments: dict[int, list[list[tuple[Record, HostWork]]]] = {}

    def walk(self) -> Iterator[Item]:
        """Yields the path backwards."""
        for index in range(len(self._program.ranks)):
            if self._times.ranks[index].end == self._times.end:
                yield from self._from_host(index, len(self._times.ranks[index].bases) - 1, None)
                return
        for index, rank in enumerate(self._times.ranks):
            for stream, spans in rank.streams.items():
                if spans.ends and spans.ends[-1] == self._times.end:
                    yield from self._from_op(_Op(index, stream, len(spans.ends) - 1))
                    return

    # -- device -----------------------------------------------------------------------------

    def _from_op(self, op: _Op | None) -> Iterator[Item]:
        while op is not None:
            kind, segment, offset, argument, seq = self._program.ranks[op.rank].streams[op.stream][
                op.place
            ]
            spans = self._times.ranks[op.rank].streams[op.stream]
            start, end = spans.starts[op.place], spans.ends[op.place]
            if kind == KERNEL:
                yield self._kernel_item(op, seq, start, end)
            elif kind == COLLECTIVE:
                began = self._times.begins[argument]
                yield self._collective_item(op, argument, seq, began, end)
                op = self._who_began(argument, began)
                start = self._times.ranks[op.rank].streams[op.stream].starts[op.place]
                if start < began:  # the one before it on the communicator ended then
                    continue
                _, segment, offset, _, _ = self._program.ranks[op.rank].streams[op.stream][op.place]
            elif kind != RECORD and end > start:
                op = self._mark_of(op.rank, argument)
                continue
            if (
                op.place
                and self._times.ranks[op.rank].streams[op.stream].ends[op.place - 1] == start
            ):
                op = op._replace(place=op.place - 1)
            elif kind <= COLLECTIVE and self._base(op.rank, segment) + offset == start:
                yield from self._from_host(op.rank, segment, (offset, seq))
                return
            else:
                return  # a mark or wait at the very start

    def _who_began(self, collective: int, began: int) -> _Op:
        """Returns the part of the rank that came last, or the collective that held this one up."""
        spec = self._program.collectives[collective]
        for rank in spec.ranks:
            op = self._part(self._index[rank], collective)
            if self._times.ranks[op.rank].streams[op.stream].starts[op.place] == began:
                return op
        before = max(
            i
            for i in range(collective)
            if self._program.collectives[i].communicator == spec.communicator
        )
        return self._part(self._index[self._program.collectives[before].ranks[0]], before)

    def _part(self, rank: int, collective: int) -> _Op:
        self._index_rank(rank)
        return self._parts[rank, collective]

    def _mark_of(self, rank: int, mark: int) -> _Op:
        self._index_rank(rank)
        return self._marks[rank][mark]

    def _index_rank(self, rank: int) -> None:
        if rank in self._is_indexed:
            return
        self._is_indexed.add(rank)
        marks = self._marks.setdefault(rank, {})
        for stream, ops in self._program.ranks[rank].streams.items():
            for index, (kind, _, _, argument, _) in enumerate(ops):
                if kind == RECORD:
                    marks[argument] = _Op(rank, stream, index)
                elif kind == COLLECTIVE:
                    self._parts[rank, argument] = _Op(rank, stream, index)

    # -- host -------------------------------------------------------------------------------

    def _base(self, rank: int, segment: int) -> int:
        return self._times.ranks[rank].bases[segment]

    def _from_host(self, rank: int, segment: int, until: tuple[int, int] | None) -> Iterator[Item]:
        """Follows the host lane back from an operation that it issued, or from its end."""
        times = self._times.ranks[rank]
        program = self._program.ranks[rank]
        length, seq = (program.segments[segment].host_ns, None) if until is None else until
        while True:
            base = times.bases[segment]
            if until is None and self._waited_at_end(rank, segment):
                waits = program.segments[segment].waits
                yield from self._from_mark(rank, waits, times.end)
                return
            yield from self._host_items(rank, segment, base, length, seq)
            if segment == 0:
                return
            segment -= 1
            if times.host_ends[segment] < base:
                yield from self._from_mark(rank, program.segments[segment].waits, base)
                return
            length, seq = program.segments[segment].host_ns, None
            until = (length, -1)

    def _waited_at_end(self, rank: int, segment: int) -> bool:
        times = self._times.ranks[rank]
        is_last = segment == len(times.bases) - 1
        return is_last and times.host_ends[segment] < times.end

    def _from_mark(self, rank: int, marks: tuple[int, ...], at: int) -> Iterator[Item]:
        """Goes on with the record that let the host go on."""
        for mark in marks:
            op = self._mark_of(rank, mark)
            if self._times.ranks[rank].streams[op.stream].ends[op.place] == at:
                yield from self._from_op(op)
                return

    def _host_items(
        self, rank: int, segment: int, base: int, length: int, seq: int | None
    ) -> Iterator[Item]:
        """Yields a stretch of host work by what it did."""
        spent: Counter[str] = Counter()
        for record, work in self._segment_records(rank, segment):
            spent[_HOST_WORDS.get(record["op"], "events and marks")] += round(work.own)
            spent["schedule nodes"] += round(work.node)
            if record["seq"] == seq:
                break
        number = self._program.ranks[rank].rank
        end = base + length
        for what, ns in sorted(spent.items(), key=lambda pair: (pair[1], pair[0])):
            start = max(base, end - ns)
            if start < end:
                yield Item(rank=number, lane="host", what=what, start=start, end=end, seq=None)
            end = start
        if end > base:
            yield Item(
                rank=number, lane="host", what="launch latency", start=base, end=end, seq=None
            )

    def _segment_records(self, rank: int, segment: int) -> list[tuple[Record, HostWork]]:
        if rank not in self._segments:
            segments: list[list[tuple[Record, HostWork]]] = [[]]
            program, work = self._program.ranks[rank], self._replay.host_work[rank]
            for record, spent in zip(self._replay.records[rank], work, strict=True):
                segments[-1].append((record, spent))
                while (
                    len(segments) < len(program.segments)
                    and program.segments[len(segments) - 1].seq == record["seq"]
                ):
                    segments.append([])
            self._segments[rank] = segments
        return self._segments[rank][segment]

    # -- labels -----------------------------------------------------------------------------

    def _kernel_item(self, op: _Op, seq: int, start: int, end: int) -> Item:
        record, place = self._label(op.rank, seq)
        if record["op"] == "kernel":
            what = kernel_class(record["name"]) or record["name"]
        else:
            what = f"{record['kind']} of one rank"
        number = self._program.ranks[op.rank].rank
        return Item(
            rank=number, lane="compute", what=f"{place}: {what}", start=start, end=end, seq=seq
        )

    def _collective_item(self, op: _Op, collective: int, seq: int, start: int, end: int) -> Item:
        spec = self._program.collectives[collective]
        if spec.unit is not None:
            what = f"{spec.kind} of units"
        elif is_all_to_all(spec.kind):
            what = f"all_to_all in {self._label(op.rank, seq)[1]}"
        else:
            what = spec.kind
        number = self._program.ranks[op.rank].rank
        return Item(rank=number, lane="communication", what=what, start=start, end=end, seq=seq)

    def _label(self, rank: int, seq: int) -> tuple[Record, str]:
        """Returns a record and the schedule node that it is in."""
        labels = self._labels.get(rank)
        if labels is None:
            labels = self._labels[rank] = {}
            nodes: list[str] = []
            for record in self._replay.records[rank]:
                op = record["op"]
                if op == "node":
                    nodes.append(f"{record['name']} {record['direction']}")
                elif op == "node_end" and nodes:
                    nodes.pop()
                labels[record["seq"]] = (record, nodes[-1] if nodes else "outside nodes")
        return labels[seq]
