"""Where a step's time goes, in the words of Holistic Trace Analysis.

Compute is time in kernels, communication time in collectives, from when this rank is there. A
stream is idle otherwise. Communication is exposed while no kernel of the rank runs, and hidden
otherwise. An idle device waits for the host when what it does next starts as soon as the host has
issued it, and for other work otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.timing.costs.collectives import is_all_to_all
from sim.timing.replay.intervals import Interval, overlap, total, union
from sim.timing.replay.program import COLLECTIVE, CollectiveSpec
from sim.timing.replay.timeline import Replay


@dataclass(frozen=True, kw_only=True)
class StreamBreakdown:
    """One stream over the step, in nanoseconds.

    Attributes:
        stream: Its number; below 0 for a communicator's own stream.
        role: What runs on it most: "compute", or its kinds of collective, joined by +.
        compute_ns: Time in kernels.
        comm_ns: Time in collectives.
        idle_ns: The rest.
    """

    stream: int
    role: str
    compute_ns: int
    comm_ns: int
    idle_ns: int


@dataclass(frozen=True, kw_only=True)
class RankBreakdown:
    """One rank over the step, in nanoseconds.

    Attributes:
        rank: Its number.
        streams: Its streams.
        compute_ns: Time with a kernel on any stream.
        comm_ns: Time with a collective on any stream.
        exposed_comm_ns: Time with a collective and no kernel.
        a2a_ns: Time with an all-to-all.
        exposed_a2a_ns: Time with one and no kernel.
        fsdp_ns: Time with a unit's all-gather, reduce-scatter or all-reduce.
        exposed_fsdp_ns: Time with one and no kernel.
        idle_ns: Time with nothing on the device.
        host_idle_ns: Idle because the host had not issued what comes next.
        host_busy_ns: Time in which the host was not waiting.
    """

    rank: int
    streams: list[StreamBreakdown]
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    a2a_ns: int
    exposed_a2a_ns: int
    fsdp_ns: int
    exposed_fsdp_ns: int
    idle_ns: int
    host_idle_ns: int
    host_busy_ns: int


def break_down(replay: Replay, rank: int) -> RankBreakdown:
    """Returns where one rank's step goes."""
    step = replay.step_ns
    specs = replay.times.program.collectives
    kernels: dict[int, list[Interval]] = {}
    comms: dict[int, list[tuple[Interval, CollectiveSpec]]] = {}
    for span in replay.spans(rank):
        if span.collective is None:
            kernels.setdefault(span.stream, []).append((span.start, span.end))
        else:
            interval = (span.start, span.end)
            comms.setdefault(span.stream, []).append((interval, specs[span.collective]))
    streams = [
        _stream(stream, kernels.get(stream, []), comms.get(stream, []), step)
        for stream in replay.times.program.ranks[rank].streams
    ]
    compute = union(interval for found in kernels.values() for interval in found)
    every = [pair for found in comms.values() for pair in found]
    comm = union(interval for interval, _ in every)
    a2a = union(interval for interval, spec in every if is_all_to_all(spec.kind))
    fsdp = union(interval for interval, spec in every if spec.unit is not None)
    busy = union([*compute, *comm])
    return RankBreakdown(
        rank=replay.times.program.ranks[rank].rank,
        streams=[stream for stream in streams if stream.role],
        compute_ns=total(compute),
        comm_ns=total(comm),
        exposed_comm_ns=total(comm) - overlap(comm, compute),
        a2a_ns=total(a2a),
        exposed_a2a_ns=total(a2a) - overlap(a2a, compute),
        fsdp_ns=total(fsdp),
        exposed_fsdp_ns=total(fsdp) - overlap(fsdp, compute),
        idle_ns=step - total(busy),
        host_idle_ns=_host_idle(replay, rank, busy),
        host_busy_ns=sum(segment.host_ns for segment in replay.times.program.ranks[rank].segments),
    )


def _stream(
    stream: int,
    kernels: list[Interval],
    comms: list[tuple[Interval, CollectiveSpec]],
    step: int,
) -> StreamBreakdown:
    compute = total(union(kernels))
    comm = total(union(interval for interval, _ in comms))
    kinds = dict.fromkeys(
        "all_to_all" if is_all_to_all(spec.kind) else spec.kind
        for (start, end), spec in comms
        if end > start
    )
    # A few small operations of the other sort do not change what a stream is for.
    role = "compute" if compute > comm else "+".join(kinds)
    return StreamBreakdown(
        stream=stream,
        role=role,
        compute_ns=compute,
        comm_ns=comm,
        idle_ns=step - compute - comm,
    )


def _host_idle(replay: Replay, rank: int, busy: list[Interval]) -> int:
    """Adds up the gaps that end as soon as the host has issued what follows."""
    issued = _issued(replay, rank)
    idle = before = 0
    for start, end in busy:
        if start > before and start in issued:
            idle += start - before
        before = end
    return idle


def _issued(replay: Replay, rank: int) -> set[int]:
    """Returns all times at which an operation started because it was issued then."""
    times = replay.times.ranks[rank]
    found = set()
    for stream, ops in replay.times.program.ranks[rank].streams.items():
        for op, start in zip(ops, times.streams[stream].starts, strict=True):
            if op[0] <= COLLECTIVE and start == times.bases[op[1]] + op[2]:
                found.add(start)
    return found


def hidden_share(all_ns: int, exposed_ns: int) -> float | None:
    """Returns the share of some communication beside which kernels ran; None if there is none."""
    return None if all_ns == 0 else 1.0 - exposed_ns / all_ns


def summary(ranks: Sequence[RankBreakdown], step_ns: int) -> dict[str, Any]:
    """Returns the means over ranks under the names of `sim time --json`."""

    def mean(name: str) -> float:
        values: list[int] = [getattr(rank, name) for rank in ranks]
        return sum(values) / len(values)

    return {
        "step_ms": step_ns / 1e6,
        "compute_ms": mean("compute_ns") / 1e6,
        "comm_ms": mean("comm_ns") / 1e6,
        "exposed_comm_ms": mean("exposed_comm_ns") / 1e6,
        "a2a_hidden": hidden_share(
            sum(rank.a2a_ns for rank in ranks), sum(rank.exposed_a2a_ns for rank in ranks)
        ),
        "fsdp_comm_hidden": hidden_share(
            sum(rank.fsdp_ns for rank in ranks), sum(rank.exposed_fsdp_ns for rank in ranks)
        ),
        "idle_ms": mean("idle_ns") / 1e6,
        "host_idle_ms": mean("host_idle_ns") / 1e6,
        "host_busy_ms": mean("host_busy_ns") / 1e6,
    }
