"""The transport between processes computes what the one in process computes.

Both ends run as threads here: only the transport and the group are under test.
"""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from real.trace import Recorder
from sim.cuda import FakeDevice, fake_cuda, use_device
from sim.world import World
from sim.world.errors import MismatchError
from sim.world.gloo_transport import Gloo, LostRankError
from sim.world.process_group import FakeProcessGroup

Body = Callable[[FakeProcessGroup, int], Any]


class _Board:
    def __init__(self) -> None:
        self.posts: list[str] = []

    def post(self, standing: str, *, is_waiting: bool) -> None:
        self.posts.append(standing)


def _over_gloo(
    folder: Path, body: Body, *, timeout_s: float = 10, boards: list[_Board] | None = None
) -> list[Any]:
    """Runs a body on two ranks over gloo; an exception is its rank's result."""
    results: list[Any] = [None, None]
    boards = boards or [_Board(), _Board()]
    both_ended = threading.Barrier(2)

    def run(rank: int) -> None:
        with use_device(FakeDevice(rank, Recorder())):
            store = dist.FileStore(str(folder / "store"), 2)
            group = FakeProcessGroup(Gloo(store, rank, timeout_s, boards[rank]), "0", rank, [0, 1])
            try:
                results[rank] = body(group, rank)
            except (MismatchError, LostRankError) as error:
                results[rank] = error
            both_ended.wait(30)  # a rank that left would break the other's connection

    with fake_cuda():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def _in_process(body: Body) -> list[Any]:
    def run(rank: int) -> Any:
        with use_device(FakeDevice(rank, Recorder())):
            world_group = FakeProcessGroup(world.transport_of(rank), "0", rank, [0, 1])
            return body(world_group, rank)

    world = World(2)
    with fake_cuda():
        return world.run(run)


def _random(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator).bfloat16()


def _all_gather(group: FakeProcessGroup, rank: int) -> Any:
    output = torch.empty(10, dtype=torch.bfloat16)
    group._allgather_base(output, _random(rank, 5))
    return output.tolist()


def _large_all_gather(group: FakeProcessGroup, rank: int) -> Any:
    """Data that does not fit into a block."""
    output = torch.empty(200_000, dtype=torch.bfloat16)
    group._allgather_base(output, _random(rank, 100_000))
    return output.double().cumsum(0)[-1].item(), output[::1000].tolist()


def _reduce_scatter(group: FakeProcessGroup, rank: int) -> Any:
    output = torch.empty(3, dtype=torch.bfloat16)
    opts = SimpleNamespace(reduceOp=dist.ReduceOp.AVG, asyncOp=False)
    group._reduce_scatter_base(output, _random(rank, 6), opts)
    return output.tolist()


def _all_reduce(group: FakeProcessGroup, rank: int) -> Any:
    value = _random(rank, 7)
    group.allreduce([value])
    return value.tolist()


def _all_to_all(group: FakeProcessGroup, rank: int) -> Any:
    outputs = [torch.empty(2, rank + 1, dtype=torch.bfloat16) for _ in range(2)]
    group.alltoall(outputs, [_random(rank, 2, 1), _random(rank, 2, 2)])
    return [output.tolist() for output in outputs]


def _all_to_all_single(group: FakeProcessGroup, rank: int) -> Any:
    splits = [[2, 1], [0, 3]]
    output = torch.empty(splits[0][rank] + splits[1][rank], 4, dtype=torch.bfloat16)
    received = [splits[0][rank], splits[1][rank]]
    group.alltoall_base(output, _random(rank, 3, 4), received, splits[rank])
    return output.tolist()


def _roots(group: FakeProcessGroup, rank: int) -> Any:
    opts = SimpleNamespace(rootRank=1, rootTensor=0, reduceOp=dist.ReduceOp.SUM, asyncOp=False)
    told, reduced, mine = _random(rank, 2), _random(rank, 2), torch.empty(2, dtype=torch.bfloat16)
    gathered = [torch.empty(2, dtype=torch.bfloat16) for _ in range(2)]
    group.broadcast([told], opts)
    group.reduce([reduced], opts)
    group.scatter([mine], [[_random(5, 2), _random(6, 2)]] if rank == 1 else [], opts)
    group.gather([gathered] if rank == 1 else [], [_random(rank, 2)], opts)
    group.barrier()
    return [tensor.tolist() for tensor in (told, reduced, mine)], rank and str(gathered)


def _messages(group: FakeProcessGroup, rank: int) -> Any:
    received = [torch.empty(2, dtype=torch.bfloat16), torch.empty(20_000, dtype=torch.bfloat16)]
    for tensor in received:
        group.send([_random(rank, tensor.numel())], 1 - rank)
    works = [group.recv([tensor], 1 - rank) for tensor in received]
    for work in works:
        work.wait()
    return [tensor[:2].tolist() for tensor in received]


def _asynchronous(group: FakeProcessGroup, rank: int) -> Any:
    """Ranks wait in different orders, and one of them never waits for the second."""
    opts = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, asyncOp=True)
    values = [_random(rank, 2) for _ in range(3)]
    works = [group.allreduce([value], opts) for value in values]
    for index in (2, 0) if rank == 0 else (0, 2):
        works[index].wait()
    return [values[0].tolist(), values[2].tolist()]


@pytest.mark.parametrize(
    "body",
    [
        _all_gather,
        _large_all_gather,
        _reduce_scatter,
        _all_reduce,
        _all_to_all,
        _all_to_all_single,
        _roots,
        _messages,
    ],
)
def test_both_transports_give_the_same_bits(tmp_path: Path, body: Body) -> None:
    assert _over_gloo(tmp_path, body) == _in_process(body)


def test_asynchronous_collectives_may_be_waited_for_in_any_order(tmp_path: Path) -> None:
    first, second = _over_gloo(tmp_path, _asynchronous)
    assert first == second


def test_messages_that_have_arrived_are_let_go(tmp_path: Path) -> None:
    """Memory does not grow with the number of collectives."""

    def body(group: FakeProcessGroup, rank: int) -> int:
        for _ in range(50):
            group.barrier()
        [line] = group._transport._lines.values()  # type: ignore[attr-defined]
        return len(line._sent)

    assert max(_over_gloo(tmp_path, body)) <= 3


def test_mismatch_is_named_as_in_process(tmp_path: Path) -> None:
    def body(group: FakeProcessGroup, rank: int) -> None:
        if rank == 0:
            group.allreduce([torch.ones(2)])
        else:
            group._allgather_base(torch.empty(4), torch.ones(2))

    boards = [_Board(), _Board()]
    errors = _over_gloo(tmp_path, body, boards=boards)
    assert [str(error) for error in errors] == [
        (
            "Collective #0 of group '0' does not match: rank 1 calls all_gather, rank 0 calls "
            "all_reduce (operation: expected all_gather, got all_reduce; reduce op: expected None, "
            "got SUM)."
        ),
        (
            "Collective #0 of group '0' does not match: rank 0 calls all_reduce, rank 1 calls "
            "all_gather (operation: expected all_reduce, got all_gather; reduce op: expected SUM, "
            "got None)."
        ),
    ]
    assert boards[0].posts[-1] == "in all_reduce #0 of group '0' (ranks [0, 1]), waits for rank 1"


def test_splits_that_do_not_match_are_named_as_in_process(tmp_path: Path) -> None:
    def body(group: FakeProcessGroup, rank: int) -> None:
        splits = [[1, 1], [2, 0]][rank]
        group.alltoall_base(torch.empty(2), torch.ones(2), [1, 1], splits)

    errors = _over_gloo(tmp_path, body)
    assert str(errors[0]) == (
        "Sizes do not match in all_to_all_single #0 of group '0' (ranks [0, 1]): "
        "rank 1 sends 2 rows to rank 0, which expects 1."
    )


def test_rank_that_never_comes_is_lost_after_the_timeout(tmp_path: Path) -> None:
    def body(group: FakeProcessGroup, rank: int) -> None:
        if rank == 0:
            group.barrier()

    lost, _ = _over_gloo(tmp_path, body, timeout_s=0.2)
    assert isinstance(lost, LostRankError)
