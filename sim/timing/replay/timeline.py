"""A trace in time: when the host issued each record and when the device ran it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from real.trace import Trace
from real.trace.recorder import Record
from sim.timing.costs.model import CostModel
from sim.timing.replay.engine import Times, run_program
from sim.timing.replay.hostwork import HostWork, host_work
from sim.timing.replay.lower import AS_RECORDED, Conditions, Place, lower, step_records
from sim.timing.replay.program import COLLECTIVE, KERNEL


class Span(NamedTuple):
    """One operation on a device.

    Attributes:
        seq: Its record.
        stream: Where it ran; below 0 for a communicator's own stream.
        start: When it started; for a collective, when this rank was there.
        end: When it ended.
        collective: Its place in the program's collectives, or None for a kernel.
    """

    seq: int
    stream: int
    start: int
    end: int
    collective: int | None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay of one step found. Times are nanoseconds since the step began.

    Attributes:
        traces: What was replayed.
        step: The step, or None for the last.
        model: What things cost.
        times: When the engine ran everything.
    """

    traces: Sequence[Trace]
    step: int | None
    model: CostModel
    times: Times

    @property
    def step_ns(self) -> int:
        """From an idle cluster to an idle cluster."""
        return self.times.end

    @cached_property
    def records(self) -> list[list[Record]]:
        """The step's records, by rank."""
        return [step_records(trace, self.step) for trace in self.traces]

    @cached_property
    def host_work(self) -> list[list[HostWork]]:
        """What the host spends on each of these records, by rank."""
        return [host_work(records, self.model) for records in self.records]

    def spans(self, rank: int) -> Iterator[Span]:
        """Yields the kernels and collectives of a rank, stream by stream."""
        program = self.times.program.ranks[rank]
        for stream, ops in program.streams.items():
            times = self.times.ranks[rank].streams[stream]
            for op, start, end in zip(ops, times.starts, times.ends, strict=True):
                if op[0] == KERNEL:
                    yield Span(op[4], stream, start, end, None)
                elif op[0] == COLLECTIVE:
                    yield Span(op[4], stream, start, end, op[3])

    def host_times(self, rank: int) -> Iterator[tuple[Record, int]]:
        """Yields each record of a rank with the time at which the host was done with it."""
        program, times = self.times.program.ranks[rank], self.times.ranks[rank]
        segment, spent = 0, 0.0
        for record, work in zip(self.records[rank], self.host_work[rank], strict=True):
            spent += work.own + work.node
            yield record, times.bases[segment] + int(spent)
            while (
                segment + 1 < len(program.segments)
                and program.segments[segment].seq == record["seq"]
            ):
                segment, spent = segment + 1, 0.0


def replay(
    traces: Sequence[Trace],
    model: CostModel,
    *,
    step: int | None = None,
    conditions: Conditions = AS_RECORDED,
    place: Place | None = None,
) -> Replay:
    """Replays one step of a trace in time.

    Args:
        traces: All ranks, in order.
        model: What things cost.
        step: The step; None for the last.
        conditions: What to change beside the costs.
        place: Where groups are; None puts rank after rank on nodes.

    Raises:
        ReplayError: The trace lacks what a replay needs.
    """
    program = lower(traces, model, step=step, conditions=conditions, place=place)
    return Replay(traces=traces, step=step, model=model, times=run_program(program))
