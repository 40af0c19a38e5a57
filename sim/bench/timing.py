"""How fast the timing engine is, beside a bare SimPy loop in the same process."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final

import simpy

from sim.bench.figure import Figure
from sim.timing.replay.engine import run_program
from sim.timing.replay.program import (
    COLLECTIVE,
    KERNEL,
    RECORD,
    WAIT,
    CollectiveSpec,
    Op,
    Program,
    RankProgram,
    Segment,
)

SIZES: Final = ((8, 2812), (64, 1406), (512, 1408))
"""Ranks, and operations of each: 22,500, 90,000 and 721,000 in all."""

_BARE_EVENTS: Final = 100_000


def make_dag(num_ranks: int, ops_per_rank: int, *, expert_parallel: int = 8) -> Program:
    """Returns layers of FSDP and expert parallelism, as they run under an overlapped schedule.

    A layer gathers its parameters ahead on a stream of their own, computes, sends tokens to the
    experts on a second stream and back, and reduces its gradients on a third.
    """
    layers = ops_per_rank // _LAYER_OPS
    collectives: list[CollectiveSpec] = []
    index: dict[tuple[str, int], int] = {}
    world = tuple(range(num_ranks))

    def collective(communicator: str, n: int, ranks: tuple[int, ...], kind: str, ns: int) -> int:
        known = index.get((communicator, n))
        if known is None:
            known = index[communicator, n] = len(collectives)
            collectives.append(
                CollectiveSpec(
                    communicator=communicator,
                    kind=kind,
                    unit=None,
                    ranks=ranks,
                    work_ns=ns,
                    tiers=("node",) if kind == "all_to_all" else ("network",),
                )
            )
        return known

    programs = []
    for rank in range(num_ranks):
        first = rank - rank % expert_parallel
        experts = tuple(range(first, min(first + expert_parallel, num_ranks)))
        streams: dict[int, list[Op]] = {0: [], 1: [], 2: [], 3: []}
        host = 0
        for layer in range(layers):
            mark = 4 * layer
            gather = collective("gather", layer, world, "all_gather", 40_000)
            there = collective(f"experts {first}", 2 * layer, experts, "all_to_all", 30_000)
            back = collective(f"experts {first}", 2 * layer + 1, experts, "all_to_all", 30_000)
            reduce = collective("reduce", layer, world, "reduce_scatter", 50_000)
            for stream, kind, argument in (
                (1, COLLECTIVE, gather), (1, RECORD, mark), (0, WAIT, mark),
                (0, KERNEL, 30_000), (0, KERNEL, 25_000), (0, RECORD, mark + 1),
                (2, WAIT, mark + 1), (2, COLLECTIVE, there), (2, RECORD, mark + 2),
                (0, KERNEL, 35_000), (0, WAIT, mark + 2), (0, KERNEL, 60_000),
                (2, COLLECTIVE, back), (0, KERNEL, 20_000), (0, RECORD, mark + 3),
                (3, WAIT, mark + 3), (3, COLLECTIVE, reduce),
            ):  # fmt: skip
                host += 2_000
                streams[stream].append((kind, 0, host, argument, -1))
        programs.append(RankProgram(rank=rank, segments=[Segment(host_ns=host)], streams=streams))
    return Program(ranks=programs, collectives=collectives, compute_slowdown=1.05)


_LAYER_OPS: Final = 17


def figures(sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Figure]:
    """Measures seconds of processor time and operations a second for each size."""
    bare = _bare_rate()
    result: list[Figure] = []
    for num_ranks, ops_per_rank in sizes:
        program = make_dag(num_ranks, ops_per_rank)
        started = time.process_time()
        run_program(program)
        seconds = time.process_time() - started
        rate = program.num_ops / seconds
        name = f"timing, {num_ranks} ranks, {program.num_ops} operations"
        bound = _BOUNDS[num_ranks] if num_ranks in _BOUNDS else float("nan")
        result.append(_figure(f"{name}: processor seconds", seconds, "s", "bound", bound))
        result.append(
            _figure(f"{name}: rate", rate, "operations/s", "bare SimPy timeouts a second", bare)
        )
    return result


_BOUNDS: Final = {8: 0.15, 64: 1.0, 512: 10.0}


def _figure(name: str, value: float, unit: str, peer: str, peer_value: float) -> Figure:
    return Figure(
        name=name,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        ratio=value / peer_value,
    )


def _bare_rate() -> float:
    """Returns how many timeouts a second one SimPy process gets through here and now."""
    env = simpy.Environment()

    def loop() -> Generator[simpy.Event, Any, None]:
        for _ in range(_BARE_EVENTS):
            yield env.timeout(1)

    env.process(loop())
    started = time.process_time()
    env.run()
    return _BARE_EVENTS / (time.process_time() - started)
