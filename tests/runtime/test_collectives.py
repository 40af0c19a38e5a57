"""Every collective moves real data, and refuses what does not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sim.world import WorldError

RunRanks = Callable[..., list[Any]]

# torch marks some collectives as going away while Megatron still calls them.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def _ints(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_all_gather_into_tensor_puts_ranks_in_order(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        output = torch.empty(4)
        dist.all_gather_into_tensor(output, _ints(rank, 10 + rank))
        return output.tolist()

    assert run_ranks(2, body) == [[0, 10, 1, 11]] * 2


def test_all_gather_fills_a_list(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        outputs = [torch.empty(1) for _ in range(3)]
        dist.all_gather(outputs, _ints(rank))
        return [output.tolist() for output in outputs]

    assert run_ranks(3, body) == [[[0], [1], [2]]] * 3


def test_all_gather_coalesced_keeps_its_tensors_apart(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[list[float]]]:
        outputs = [[torch.empty(1), torch.empty(1)], [torch.empty(2), torch.empty(2)]]
        # torch wants one list of outputs for each rank's tensors.
        dist.all_gather_coalesced(
            [[outputs[0][r], outputs[1][r]] for r in range(2)],
            [_ints(rank), _ints(rank, -rank)],
        )
        return [[output.tolist() for output in group] for group in outputs]

    assert run_ranks(2, body) == [[[[0], [1]], [[0, 0], [1, -1]]]] * 2


def test_coalescing_manager_completes_all_gathers_together(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        first, second = torch.empty(2), torch.empty(4)
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.all_gather_into_tensor(first, _ints(rank))
            dist.all_gather_into_tensor(second, _ints(rank, rank))
        return [first.tolist(), second.tolist()]

    assert run_ranks(2, body) == [[[0, 1], [0, 0, 1, 1]]] * 2


def test_coalescing_manager_waits_only_when_asked_to(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        outputs = [torch.zeros(1), torch.zeros(1)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as work:
            for i, output in enumerate(outputs):
                dist.reduce_scatter_tensor(output, _ints(i + rank, i - rank))
        work.wait()
        return [output.tolist() for output in outputs]

    assert run_ranks(2, body) == [[[1], [3]], [[-1], [1]]]


@pytest.mark.parametrize(("op", "expected"), [("SUM", [[3.0], [5.0]]), ("AVG", [[1.5], [2.5]])])
def test_reduce_scatter_tensor_leaves_each_rank_its_part(
    run_ranks: RunRanks, op: str, expected: list[list[float]]
) -> None:
    def body(rank: int) -> list[float]:
        output = torch.empty(1)
        reduce_op = getattr(dist.ReduceOp, op)
        dist.reduce_scatter_tensor(output, _ints(1 + rank, 2 + rank), op=reduce_op)
        return output.tolist()

    assert run_ranks(2, body) == expected


def test_reduce_scatter_takes_a_list(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        output = torch.empty(1)
        dist.reduce_scatter(output, [_ints(rank), _ints(10 * rank)])
        return output.tolist()

    assert run_ranks(2, body) == [[1], [10]]


def test_sums_of_bfloat16_are_rounded_once(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        value = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(3, body) == [258.0] * 3  # one after the other 256 + 1 rounds to 256


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", 6), ("AVG", 2), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3)],
)
def test_all_reduce_knows_every_plain_op(run_ranks: RunRanks, op: str, expected: int) -> None:
    def body(rank: int) -> float:
        value = _ints(rank + 1)
        dist.all_reduce(value, op=getattr(dist.ReduceOp, op))
        return value.item()

    assert run_ranks(3, body) == [expected] * 3


def test_all_reduce_takes_bitwise_ops_of_integers(run_ranks: RunRanks) -> None:
    def body(rank: int) -> int:
        value = torch.tensor([1 << rank])
        dist.all_reduce(value, op=dist.ReduceOp.BOR)
        return int(value.item())

    assert run_ranks(3, body) == [0b111] * 3


def test_all_reduce_coalesced_reduces_each_tensor(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        values = [_ints(rank), _ints(1, rank)]
        dist.all_reduce_coalesced(values)
        return [value.tolist() for value in values]

    assert run_ranks(2, body) == [[[1], [2, 1]]] * 2


def test_all_to_all_single_exchanges_even_parts(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        output = torch.empty(2)
        dist.all_to_all_single(output, _ints(rank, 10 + rank))
        return output.tolist()

    assert run_ranks(2, body) == [[0, 1], [10, 11]]


def test_all_to_all_single_exchanges_uneven_rows(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        if rank == 0:
            given, in_splits, out_splits = torch.tensor([[1.0, 1], [2, 2]]), [2, 0], [0, 1]
        else:
            given, in_splits, out_splits = torch.tensor([[3.0, 3], [4, 4]]), [1, 1], [0, 1]
        in_splits, out_splits = ([0, 2], [0, 1]) if rank == 0 else ([1, 1], [2, 1])
        output = torch.empty(sum(out_splits), 2)
        dist.all_to_all_single(output, given, out_splits, in_splits)
        return output.tolist()

    assert run_ranks(2, body) == [[[3, 3]], [[1, 1], [2, 2], [4, 4]]]


def test_all_to_all_exchanges_lists_of_any_size(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        given = [torch.full((rank + 1,), float(10 * rank + target)) for target in range(2)]
        outputs = [torch.empty(source + 1) for source in range(2)]
        dist.all_to_all(outputs, given)
        return [output.tolist() for output in outputs]

    assert run_ranks(2, body) == [[[0], [10, 10]], [[1], [11, 11]]]


def test_broadcast_copies_the_source(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        value = _ints(rank)
        dist.broadcast(value, src=1)
        return value.item()

    assert run_ranks(3, body) == [1, 1, 1]


def test_scatter_gives_each_rank_its_tensor(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        output = torch.empty(1)
        dist.scatter(output, [_ints(i * 5) for i in range(3)] if rank == 2 else None, src=2)
        return output.item()

    assert run_ranks(3, body) == [0, 5, 10]


def test_gather_fills_the_root_alone(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float] | None:
        outputs = [torch.empty(1) for _ in range(2)] if rank == 1 else None
        dist.gather(_ints(rank + 7), outputs, dst=1)
        return None if outputs is None else [output.item() for output in outputs]

    assert run_ranks(2, body) == [None, [7, 8]]


def test_reduce_changes_the_root_alone(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        value = _ints(rank + 1)
        dist.reduce(value, dst=0)
        return value.item()

    assert run_ranks(2, body) == [3, 2]


def test_send_is_taken_by_the_matching_recv(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        values = [torch.zeros(1), torch.zeros(1)]
        for value in values:
            if rank == 0:
                value += 1 + len(values)
                dist.send(value, dst=1)
            else:
                dist.recv(value, src=0)
        return [value.item() for value in values]

    assert run_ranks(2, body)[1] == [3, 3]


def test_isend_copies_before_it_returns_and_irecv_waits(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        value = _ints(5 if rank == 0 else 0)
        work = dist.isend(value, 1) if rank == 0 else dist.irecv(value, 0)
        assert work is not None
        work.wait()
        return value.item()

    assert run_ranks(2, body) == [5, 5]


def test_batch_isend_irecv_swaps_neighbours(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        output = torch.empty(1)
        other = 1 - rank
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, _ints(rank), other), dist.P2POp(dist.irecv, output, other)]
        )
        for work in works:
            work.wait()
        return output.item()

    assert run_ranks(2, body) == [1, 0]


def test_barrier_lets_nobody_pass_before_the_last(run_ranks: RunRanks) -> None:
    order: list[str] = []

    def body(rank: int) -> None:
        order.append("arrive")
        dist.barrier()
        order.append("pass")

    run_ranks(3, body)
    assert order == ["arrive"] * 3 + ["pass"] * 3


def test_objects_travel_like_tensors(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[Any]:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, {"rank": rank})
        told = [f"from {rank}"]
        dist.broadcast_object_list(told, src=1)
        at_root: list[Any] | None = [None, None] if rank == 0 else None
        dist.gather_object((rank,), at_root, dst=0)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ["a", "bb"] if rank == 0 else None, src=0)
        return [gathered, told, at_root, mine]

    everyone = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(2, body) == [
        [everyone, ["from 1"], [(0,), (1,)], ["a"]],
        [everyone, ["from 1"], None, ["bb"]],
    ]


def test_async_op_is_done_after_its_wait(run_ranks: RunRanks) -> None:
    def body(rank: int) -> tuple[bool, float]:
        value = _ints(rank)
        work = dist.all_reduce(value, async_op=True)
        if rank == 0:
            early = work.is_completed() and value.item() != 1
        else:
            early = False
        work.wait()
        assert work.is_completed()
        return early, value.item()

    assert run_ranks(2, body) == [(False, 1), (False, 1)]


def test_polling_for_completion_lets_the_others_run(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        value = _ints(rank)
        work = dist.all_reduce(value, async_op=True)
        while not work.is_completed():
            pass
        return value.item()

    assert run_ranks(2, body) == [1, 1]


def test_futures_carry_the_result(run_ranks: RunRanks) -> None:
    def body(rank: int) -> float:
        work = dist.all_reduce(_ints(rank), async_op=True)
        return work.get_future().wait()[0].item()

    assert run_ranks(2, body) == [1, 1]


def test_groups_of_one_and_of_some_ranks_are_groups(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        alone = [dist.new_group([i]) for i in range(3)][rank]
        pair = dist.new_group([0, 2])
        value, shared = _ints(rank), _ints(rank)
        dist.all_reduce(value, group=alone)
        if rank != 1:
            dist.all_reduce(shared, group=pair)
        return [value.item(), shared.item(), dist.get_world_size(alone)]

    assert run_ranks(3, body) == [[0, 2, 1], [1, 1, 1], [2, 2, 1]]


def test_functional_collectives_return_new_tensors(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        value = _ints(rank, 1)
        return [
            functional.all_reduce(value, "sum", mesh).tolist(),
            functional.all_gather_tensor(value, 0, mesh).tolist(),
            functional.reduce_scatter_tensor(value, "avg", 0, mesh).tolist(),
            functional.all_to_all_single(value, None, None, mesh).tolist(),
            functional.broadcast(value, 1, mesh).tolist(),
            value.tolist(),
        ]

    assert run_ranks(2, body) == [
        [[1, 2], [0, 1, 1, 1], [0.5], [0, 1], [1, 1], [0, 1]],
        [[1, 2], [0, 1, 1, 1], [1], [1, 1], [1, 1], [1, 1]],
    ]


def test_dtensor_is_redistributed_over_a_mesh_of_two_axes(run_ranks: RunRanks) -> None:
    whole = torch.arange(16.0).view(4, 4)

    def body(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        tensor = distribute_tensor(whole.clone(), mesh, [Shard(0), Shard(1)])
        moved = tensor.redistribute(placements=[Replicate(), Shard(0)])
        partial = DTensor.from_local(whole / 4, mesh, [Partial(), Partial()])
        summed = partial.redistribute(placements=[Shard(0), Replicate()])
        row = mesh["inner"].get_local_rank()
        return (
            torch.equal(tensor.full_tensor(), whole)
            and torch.equal(moved.to_local(), whole[2 * row : 2 * row + 2])
            and torch.equal(summed.full_tensor(), whole)
        )

    assert run_ranks(4, body) == [True] * 4


# -- mismatches -------------------------------------------------------------------------------


def _kind(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), src=0)


def _size(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank))


def _dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float32 if rank else torch.bfloat16))


def _op(rank: int) -> None:
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def _root(rank: int) -> None:
    dist.broadcast(torch.ones(2), src=rank)


def _splits(rank: int) -> None:
    dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [2, 0] if rank else [1, 1])


def _list_sizes(rank: int) -> None:
    given = [torch.ones(1), torch.ones(3 if rank else 1)]
    dist.all_to_all([torch.ones(1), torch.ones(1)], given)


@pytest.mark.parametrize(
    ("body", "difference"),
    [
        (_kind, "operation: expected "),
        (_size, "numel: expected "),
        (_dtype, "dtype: expected "),
        (_op, "reduce op: expected "),
        (_root, "root: expected "),
        (_splits, "rank 1 sends 2 rows to rank 0, which expects 1"),
        (_list_sizes, "rank 1 sends 3 elements to rank 1, which expects 1"),
    ],
)
def test_mismatch_names_what_is_different(
    run_ranks: RunRanks, body: Callable[[int], None], difference: str
) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, body, replay="python -m sim run")
    assert difference in caught.value.problem
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)
    assert str(caught.value).endswith("Replay: python -m sim run")


def test_calls_of_different_groups_are_a_deadlock_that_names_both(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.all_reduce(torch.ones(1), group=groups[rank])

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body)
    assert str(caught.value).splitlines() == [
        "Deadlock: no rank can go on; waiting: 0, 1.",
        "  rank 0: in all_reduce #0 of group '1' (ranks [0, 1]), waits for rank 1",
        "  rank 1: in all_reduce #0 of group '2' (ranks [0, 1]), waits for rank 0",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
            "Expected outputs of 2 x 2 elements in an all_gather, got 3.",
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)),
            "Expected inputs of 2 x 2 elements in a reduce_scatter, got 3.",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], [1, 1]),
            "Expected 2 output splits of an all_to_all_single with a sum of 2, got [1, 2].",
        ),
    ],
)
def test_sizes_that_cannot_fit_are_refused_at_the_call(
    run_ranks: RunRanks, call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, lambda rank: call())
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == message


def test_premultiplied_sum_scales_before_it_adds(run_ranks: RunRanks) -> None:
    """Megatron's FSDP divides gradients this way."""

    def body(rank: int) -> list[float]:
        output = torch.empty(1, dtype=torch.bfloat16)
        given = torch.tensor([1.0 + rank, 3.0], dtype=torch.bfloat16)
        op = dist._make_nccl_premul_sum(0.5)
        dist.reduce_scatter_tensor(output, given, op=op)
        return output.tolist()

    assert run_ranks(2, body) == [[1.5], [3.0]]


def test_premultiplied_sums_of_different_factors_do_not_match(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        dist.all_reduce(_ints(1), op=dist._make_nccl_premul_sum(0.5 + rank))

    with pytest.raises(WorldError, match=r"\(factor: expected [01]\.5, got [01]\.5\)"):
        run_ranks(2, body)


def test_all_gather_takes_a_list_of_uneven_tensors(run_ranks: RunRanks) -> None:
    """NCCL broadcasts each of them."""

    def body(rank: int) -> list[list[float]]:
        outputs = [torch.empty(source + 1) for source in range(3)]
        dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
        return [output.tolist() for output in outputs]

    assert run_ranks(3, body) == [[[0], [1, 1], [2, 2, 2]]] * 3


def test_uneven_all_gather_of_another_size_names_both_ranks(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        dist.all_gather([torch.empty(1), torch.empty(2)], torch.zeros(2))

    with pytest.raises(WorldError, match="rank 0 sends 2 elements to rank 0, which expects 1"):
        run_ranks(2, body)


def test_all_reduce_asks_for_equal_counts_not_for_equal_shapes(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[int]:
        tensor = torch.arange(6.0).view([(2, 3), (3, 2)][rank])
        dist.all_reduce(tensor)
        return tensor.flatten().tolist()

    assert run_ranks(2, body) == [[0, 2, 4, 6, 8, 10]] * 2


def test_average_of_integers_is_cut_off(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[int]:
        tensor = torch.tensor([rank, -3 * rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return tensor.tolist()

    assert run_ranks(2, body) == [[0, -1]] * 2


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "send"])
def test_strided_tensors_are_refused_as_by_nccl(run_ranks: RunRanks, call: str) -> None:
    def body(rank: int) -> None:
        strided = torch.zeros(4, 4).t()
        if call == "all_reduce":
            dist.all_reduce(strided)
        elif call == "all_gather":
            dist.all_gather_into_tensor(torch.empty(8, 4), strided)
        else:
            dist.send(strided, 1 - rank)

    with pytest.raises(WorldError, match=r"Expected a contiguous tensor in a .*\[1, 4\]"):
        run_ranks(2, body)


def test_future_of_a_work_does_not_wait_for_the_others(run_ranks: RunRanks) -> None:
    """A rank that waited at once would never come to the call that the other is in."""

    def body(rank: int) -> list[float]:
        first, second = _ints(rank), _ints(10 * rank)
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        calls = [(first, groups[0]), (second, groups[1])]
        futures = []
        for tensor, group in calls if rank == 0 else reversed(calls):
            work = dist.all_reduce(tensor, group=group, async_op=True)
            futures.append(work.get_future().then(lambda future: future.value()[0] + 1))
            assert futures[-1].done()
        values = [future.wait().item() for future in futures]
        return values if rank == 0 else values[::-1]

    assert run_ranks(2, body) == [[2, 11]] * 2


def test_callbacks_of_a_future_run_when_its_work_is_waited_for(run_ranks: RunRanks) -> None:
    def body(rank: int) -> list[float]:
        seen: list[float] = []
        tensor = _ints(rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().add_done_callback(lambda future: seen.append(future.value()[0].item()))
        assert not seen
        work.wait()
        return seen

    assert run_ranks(2, body) == [[3]] * 2


def test_every_rank_sees_the_same_number_of_devices(run_ranks: RunRanks) -> None:
    assert run_ranks(3, lambda rank: torch.cuda.device_count()) == [3, 3, 3]
