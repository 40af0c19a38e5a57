"""What the engine runs: one host lane and a list of operations a stream, for every rank.

An operation is a plain tuple, since there are hundreds of thousands of them:
`(kind, segment, offset, argument, seq)`. The host issues it `offset` nanoseconds after the start of
its `segment`, a stretch of host work between two waits of the host. `argument` depends on the kind
and `seq` is the record that it stands for, or -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

KERNEL: Final = 0
"""A kernel; the argument is its time alone on the device, in nanoseconds."""

COLLECTIVE: Final = 1
"""This rank's part in a collective; the argument is its place in `Program.collectives`."""

RECORD: Final = 2
"""Marks the stream's work so far as done; the argument is the mark."""

WAIT: Final = 3
"""Waits for a mark; the argument is the mark."""

Op = tuple[int, int, int, int, int]


class ReplayError(ValueError):
    """A trace that cannot be replayed in time: the message says what is missing."""


@dataclass(kw_only=True, slots=True)
class Segment:
    """Host work between two waits.

    Attributes:
        host_ns: How long the host is busy.
        waits: Marks that it then waits for.
        seq: The record after which it waits, or -1.
    """

    host_ns: int = 0
    waits: tuple[int, ...] = ()
    seq: int = -1


@dataclass(kw_only=True, slots=True)
class RankProgram:
    """Everything that one rank does.

    Attributes:
        rank: Its number.
        segments: Its host lane.
        streams: Operations by stream, each list in host order. Streams below 0 are the
            communicators' own, for asynchronous collectives.
    """

    rank: int
    segments: list[Segment] = field(default_factory=list)
    streams: dict[int, list[Op]] = field(default_factory=dict)

    @property
    def num_ops(self) -> int:
        """Number of operations on all streams."""
        return sum(len(ops) for ops in self.streams.values())


@dataclass(kw_only=True, slots=True)
class CollectiveSpec:
    """One collective of a group.

    Attributes:
        communicator: Collectives of one communicator run one after another, in this order.
        kind: Its name.
        unit: FSDP unit, or None.
        ranks: Ranks that have to arrive.
        work_ns: Time alone on its links, from when all are there.
        tiers: Kinds of links that it uses.
        num_bytes: Bytes that the busiest rank gives.
    """

    communicator: str
    kind: str
    unit: str | None
    ranks: tuple[int, ...]
    work_ns: int
    tiers: tuple[str, ...]
    num_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class Program:
    """All ranks.

    Attributes:
        ranks: One program a rank, in rank order.
        collectives: All collectives, in the order in which each communicator runs them.
        compute_slowdown: How many times longer a kernel takes while a collective is on the device.
        communication_slowdown: How many times longer a collective takes while kernels run.
    """

    ranks: list[RankProgram]
    collectives: list[CollectiveSpec]
    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0

    @property
    def num_ops(self) -> int:
        """Number of operations of all ranks."""
        return sum(program.num_ops for program in self.ranks)

    def by_rank(self) -> Mapping[int, RankProgram]:
        """Returns the programs by rank."""
        return {program.rank: program for program in self.ranks}
