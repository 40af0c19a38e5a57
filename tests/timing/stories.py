"""Small programs for the timing engine, written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from sim.timing.replay.program import (
    COLLECTIVE,
    KERNEL,
    RECORD,
    WAIT,
    CollectiveSpec,
    Op,
    RankProgram,
    Segment,
)


class Story:
    """One rank's program, an operation a line, each issued after `launch` nanoseconds of host."""

    def __init__(self, rank: int = 0, launch: int = 0) -> None:
        self.program = RankProgram(rank=rank, segments=[Segment()])
        self.launch = launch

    def _add(self, stream: int, kind: int, argument: int, launch: int | None) -> None:
        segment = self.program.segments[-1]
        segment.host_ns += self.launch if launch is None else launch
        op: Op = (kind, len(self.program.segments) - 1, segment.host_ns, argument, -1)
        self.program.streams.setdefault(stream, []).append(op)

    def kernel(self, stream: int, ns: int, *, launch: int | None = None) -> None:
        self._add(stream, KERNEL, ns, launch)

    def collective(self, stream: int, index: int, *, launch: int | None = None) -> None:
        self._add(stream, COLLECTIVE, index, launch)

    def record(self, stream: int, mark: int) -> None:
        self._add(stream, RECORD, mark, 0)

    def wait(self, stream: int, mark: int) -> None:
        self._add(stream, WAIT, mark, 0)

    def host(self, ns: int) -> None:
        self.program.segments[-1].host_ns += ns

    def sync(self, *marks: int) -> None:
        self.program.segments[-1].waits = marks
        self.program.segments.append(Segment())


def collective(
    ranks: Sequence[int], ns: int, *, communicator: str = "c", kind: str = "all_gather"
) -> CollectiveSpec:
    return CollectiveSpec(
        communicator=communicator,
        kind=kind,
        unit="unit",
        ranks=tuple(ranks),
        work_ns=ns,
        tiers=("node",),
    )
