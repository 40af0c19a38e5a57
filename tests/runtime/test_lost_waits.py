"""What a rank reads that does not wait for its own collective, in this process and in the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from real.trace import MemorySink, Trace
from sim.checks import check_traces
from sim.cuda.device import active_device
from sim.cuda.kernels import KernelRecorder

RunRanks = Callable[..., list[Any]]

# torch marks some collectives as going away while Megatron still calls them.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _rules(sinks: list[MemorySink]) -> list[set[str]]:
    traces = [
        Trace(rank=rank, world_size=len(sinks), scenario={}, records=s.records, is_complete=True)
        for rank, s in enumerate(sinks)
    ]
    found = check_traces(traces)
    return [{v.rule for v in found if v.rank == rank} for rank in range(len(sinks))]


@pytest.mark.parametrize("waits", [True, False])
def test_a_lost_wait_reads_zeros_and_is_found(run_ranks: RunRanks, waits: bool) -> None:
    """Zeros and not whatever the memory held, so that two runs are equal."""
    sinks = [MemorySink(), MemorySink()]

    def body(rank: int) -> list[float]:
        with KernelRecorder(active_device()):
            gathered = torch.full((2,), 7.0)
            work = dist.all_gather_into_tensor(gathered, torch.ones(1), async_op=True)
            if waits:
                work.wait()
            seen = gathered * 1
        dist.barrier()
        work.wait()
        return [*seen.tolist(), *gathered.tolist()]

    values = run_ranks(2, body, sinks=sinks)
    expected: list[set[str]] = [set(), set()] if waits else [{"I1"}, {"I1"}]
    assert _rules(sinks) == expected
    assert [value[2:] for value in values] == [[1, 1], [1, 1]]
    # The rank that comes last completes the collective, and may see it by luck.
    assert [1, 1] in [value[:2] for value in values]
    assert (not waits) == ([0, 0] in [value[:2] for value in values])


def test_a_reduction_in_place_keeps_its_input(run_ranks: RunRanks) -> None:
    """Clearing an output that is an input would lose a part of the sum."""

    def body(rank: int) -> list[float]:
        value = torch.ones(1)
        dist.all_reduce(value, async_op=True).wait()
        return value.tolist()

    assert run_ranks(2, body) == [[2], [2]]


def test_memory_released_on_the_way_ends_no_run(run_ranks: RunRanks) -> None:
    """On a GPU it corrupts what came after; here the trace says it, and nothing crashes."""
    sinks = [MemorySink(), MemorySink()]

    def body(rank: int) -> None:
        with KernelRecorder(active_device()):
            gathered = torch.empty(2)
            gathered.zero_()
            work = dist.all_gather_into_tensor(gathered, torch.ones(1), async_op=True)
            gathered.untyped_storage().resize_(0)
        dist.barrier()
        work.wait()

    run_ranks(2, body, sinks=sinks)
    assert _rules(sinks) == [{"I4"}, {"I4"}]


def test_a_wait_moves_no_version(run_ranks: RunRanks) -> None:
    """The call itself does, as on a GPU; when the other ranks come is no affair of autograd."""

    def body(rank: int) -> list[int]:
        gathered = torch.empty(2)
        versions = [gathered._version]
        work = dist.all_gather_into_tensor(gathered, torch.ones(1), async_op=True)
        versions.append(gathered._version)
        work.wait()
        return [*versions, gathered._version]

    assert run_ranks(2, body) == [[0, 1, 1], [0, 1, 1]]


def test_messages_of_two_pairs_are_told_apart(run_ranks: RunRanks) -> None:
    """Both are number 0; the wait for one is none for the other."""
    sinks = [MemorySink() for _ in range(3)]

    def body(rank: int) -> None:
        with KernelRecorder(active_device()):
            if rank:
                dist.send(torch.full((1,), float(rank)), 0)
                return
            received = [torch.zeros(1), torch.zeros(1)]
            works = [dist.irecv(tensor, 1 + i) for i, tensor in enumerate(received)]
            assert works[0] is not None
            works[0].wait()
            received[1] * 1
            assert works[1] is not None
            works[1].wait()

    run_ranks(3, body, sinks=sinks)
    assert _rules(sinks) == [{"I1"}, set(), set()]
    waits = [r for r in sinks[0].records if r["op"] == "collective_wait"]
    assert [(r["kind"], r["n"], r["peer"]) for r in waits] == [("recv", 0, 1), ("recv", 0, 2)]
