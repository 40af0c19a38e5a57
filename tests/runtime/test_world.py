"""The world runs ranks in turn, and ends the run at once when one of them cannot go on."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim.cuda.device import active_device
from sim.world import (
    ErrorKind,
    RankState,
    SkipCollective,
    SwapCollectives,
    World,
    WorldError,
    current_world,
)

RunRanks = Callable[..., list[Any]]


def _standing(error: pytest.ExceptionInfo[WorldError]) -> list[str]:
    return error.value.standing


def test_world_hosts_any_callable() -> None:
    """A body needs neither torch.distributed nor a device."""
    assert World(3).run(lambda rank: rank * rank) == [0, 1, 4]


def test_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected at least 1 rank, got 0\."):
        World(0)


def test_world_runs_once() -> None:
    world = World(1)
    world.run(lambda rank: None)
    with pytest.raises(RuntimeError, match="Cannot run a world twice"):
        world.run(lambda rank: None)


def test_current_world_is_known_to_ranks_alone() -> None:
    assert World(2).run(lambda rank: current_world()[1]) == [0, 1]
    with pytest.raises(RuntimeError, match="outside a rank"):
        current_world()


def test_only_one_rank_runs_at_a_time(run_ranks: RunRanks) -> None:
    """Threads never overlap: a rank that is inside sees nobody else inside."""
    inside: list[int] = []

    def body(rank: int) -> bool:
        for _ in range(5):
            inside.append(rank)
            alone = inside == [rank]
            inside.remove(rank)
            dist.barrier()
        return alone

    assert run_ranks(3, body) == [True] * 3


def test_turns_follow_the_schedule_seed(run_ranks: RunRanks) -> None:
    """Equal seeds give equal orders, and some seeds differ."""

    def order(seed: int) -> list[int]:
        turns: list[int] = []

        def body(rank: int) -> None:
            for _ in range(3):
                turns.append(rank)
                dist.barrier()

        run_ranks(3, body, schedule_seed=seed)
        return turns

    assert [order(seed) for seed in range(5)] == [order(seed) for seed in range(5)]
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_globals_belong_to_one_rank_each_and_come_back(run_ranks: RunRanks) -> None:
    """Scalars, containers and missing names are exchanged at each switch and restored after it."""
    owner = SimpleNamespace(number=1, names=["outside"])
    names = [RankState(owner=owner, name=name) for name in ("number", "names", "late")]

    def body(rank: int) -> tuple[int, list[str], str]:
        owner.number += rank
        owner.names.append(f"rank {rank}")
        owner.late = f"late {rank}"
        dist.barrier()
        return owner.number, owner.names, owner.late

    assert run_ranks(2, body, state=names) == [
        (1, ["outside", "rank 0"], "late 0"),
        (2, ["outside", "rank 1"], "late 1"),
    ]
    assert vars(owner) == {"number": 1, "names": ["outside"]}


def test_random_states_belong_to_one_rank_each_and_come_back(run_ranks: RunRanks) -> None:
    """A rank draws the same numbers whether others draw in between or not."""
    torch.default_generator.manual_seed(7)
    random.seed(7)
    expected_torch, expected_python = torch.default_generator.get_state(), random.getstate()

    def body(rank: int) -> tuple[float, float]:
        torch.cuda.manual_seed(3)
        random.seed(3)
        dist.barrier()
        return torch.rand(1).item(), random.random()

    first, second = run_ranks(2, body)
    assert first == second
    assert random.getstate() == expected_python
    assert torch.equal(torch.default_generator.get_state(), expected_torch)


def test_warning_filters_belong_to_one_rank_each(run_ranks: RunRanks) -> None:
    """`catch_warnings` blocks of two ranks overlap without mixing up what they put back."""
    before = list(warnings.filters)

    def body(rank: int) -> bool:
        mine = list(warnings.filters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier()
        if rank == 0:
            dist.barrier()
            return warnings.filters == mine
        with warnings.catch_warnings():
            dist.barrier()
        return warnings.filters == mine

    assert run_ranks(2, body) == [True, True]
    assert warnings.filters == before


def test_worlds_follow_each_other_without_a_trace(run_ranks: RunRanks) -> None:
    """Process groups, threads and thread counts are those of before, also after failures."""
    threads, num_threads = set(threading.enumerate()), torch.get_num_threads()

    def body(rank: int) -> str:
        dist.all_reduce(torch.ones(1))
        if fails:
            raise ValueError("on purpose")
        return dist.group.WORLD.group_name

    for fails in [False, True] * 5:
        if fails:
            with pytest.raises(WorldError, match="on purpose"):
                run_ranks(2, body)
        else:
            assert run_ranks(2, body) == ["0", "0"]
        assert set(threading.enumerate()) == threads
        assert torch.get_num_threads() == num_threads
        assert not dist.is_initialized()


# -- failures ---------------------------------------------------------------------------------


def test_rank_that_raises_ends_the_run_and_tells_where_all_stand(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            raise ValueError("no luck")
        active_device().recorder.unit = "layers.3"
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorldError) as caught:
        run_ranks(3, body, replay="python -m sim run --schedule-seed 0")
    waiting = "in all_reduce #1 of group '0' (ranks [0, 1, 2]) for FSDP unit 'layers.3'"
    assert caught.value.problem == "Rank 1 raised ValueError: no luck"
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert _standing(caught)[1] == (
        "rank 1: raised ValueError, last in barrier #0 of group '0' (ranks [0, 1, 2])"
    )
    for rank in (0, 2):
        assert _standing(caught)[rank] in (
            f"rank {rank}: {waiting}, waits for rank 1, {2 - rank}",
            f"rank {rank}: {waiting}, waits for rank {2 - rank}, 1",
            f"rank {rank}: {waiting}, waits for rank 1",
            f"rank {rank}: about to go on after barrier #0 of group '0' (ranks [0, 1, 2])",
        )
    assert str(caught.value).endswith("\nReplay: python -m sim run --schedule-seed 0")


def test_rank_that_was_woken_no_longer_waits_in_the_report(run_ranks: RunRanks) -> None:
    """A rank whose collective is done but that has not run again is not said to wait."""

    def body(rank: int) -> None:
        dist.all_reduce(torch.ones(1))  # the last to come goes on first, and fails
        raise ValueError

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body)
    failed = caught.value.rank
    assert failed is not None
    assert _standing(caught)[1 - failed] == (
        f"rank {1 - failed}: about to go on after all_reduce #0 of group '0' (ranks [0, 1])"
    )


def test_finished_rank_leaves_the_others_in_a_deadlock(run_ranks: RunRanks) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, lambda rank: dist.barrier() if rank else None)
    assert str(caught.value).splitlines() == [
        "Deadlock: no rank can go on; waiting: 1.",
        "  rank 0: finished",
        "  rank 1: in barrier #0 of group '0' (ranks [0, 1]), waits for rank 0",
    ]


def test_recv_without_a_send_is_a_deadlock(run_ranks: RunRanks) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, lambda rank: dist.recv(torch.ones(1), 1) if rank == 0 else None)
    assert _standing(caught)[0] == (
        "rank 0: in recv from rank 1 #0 of group '0' (ranks [0, 1]), waits for the message"
    )


def test_endless_polling_is_a_deadlock(run_ranks: RunRanks) -> None:
    """A rank that asks again and again for what nobody will do does not hang."""

    def body(rank: int) -> None:
        if rank == 0:
            work = dist.barrier(async_op=True)
            while not work.is_completed():
                pass

    with pytest.raises(WorldError, match="Deadlock: a rank polls"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            lambda rank: dist.all_reduce(torch.ones(1), async_op=True) if rank else None,
            (
                "All ranks finished, but rank 1 issued all_reduce #0 of group '0' (ranks [0, 1]), "
                "rank 0 never did."
            ),
        ),
        (
            lambda rank: dist.send(torch.ones(1), 0) if rank else None,
            "All ranks finished, but rank 0 never received send #0 of group '0' (ranks [0, 1]).",
        ),
    ],
)
def test_what_nobody_waits_for_is_missed_at_the_end(
    run_ranks: RunRanks, body: Callable[[int], Any], expected: str
) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, body)
    assert caught.value.problem == expected


def test_failure_unwinds_ranks_inside_autograd(run_ranks: RunRanks) -> None:
    """A rank that waits in a backward hook, below C++ frames, runs its `finally` blocks."""
    unwound: list[int] = []

    def body(rank: int) -> None:
        weight = torch.ones(2, requires_grad=True)

        def hook(parameter: torch.Tensor) -> None:
            if rank == 1:
                raise ValueError("in a hook")
            dist.all_reduce(torch.ones(1))

        weight.register_post_accumulate_grad_hook(hook)
        try:
            weight.sum().backward()
        finally:
            unwound.append(rank)

    with pytest.raises(WorldError, match="Rank 1 raised ValueError: in a hook"):
        run_ranks(3, body)
    assert 1 in unwound
    assert torch.ones(1, requires_grad=True).sum().backward() is None  # autograd still works


def test_clean_up_that_communicates_does_not_hide_why(run_ranks: RunRanks) -> None:
    """A rank that fails and then waits in a `finally` block is reported with its failure."""

    def body(rank: int) -> None:
        try:
            if rank == 0:
                raise ValueError("first")
        finally:
            dist.all_reduce(torch.ones(1))
            dist.barrier()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body)
    assert "Rank 0 raised ValueError: first" in str(caught.value)


def test_rank_that_waits_in_a_finally_block_says_what_it_handles(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        try:
            if rank == 0:
                raise ValueError("first")
        finally:
            dist.all_reduce(torch.ones(1)) if rank == 0 else dist.all_reduce(torch.ones(2))

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body, schedule_seed=1)
    assert "does not match" in caught.value.problem
    assert "ValueError: first" in str(caught.value) or caught.value.rank == 0


def test_mismatch_ends_the_run_even_when_the_rank_catches_it(run_ranks: RunRanks) -> None:
    """A broad `except` around a collective does not let the run go on."""

    def body(rank: int) -> None:
        try:
            dist.all_reduce(torch.ones(1 + rank))
        except RuntimeError:
            dist.barrier()

    with pytest.raises(WorldError, match="numel: expected "):
        run_ranks(2, body)


def test_failures_while_others_unwind_are_consequences(run_ranks: RunRanks) -> None:
    """The first failure is the one that is reported."""

    def body(rank: int) -> None:
        try:
            dist.barrier()
            if rank == 0:
                raise ValueError("first")
            dist.all_reduce(torch.ones(1))
        finally:
            if rank:
                raise KeyError("second")

    with pytest.raises(WorldError, match="Rank 0 raised ValueError: first"):
        run_ranks(3, body)


def test_exit_of_a_rank_is_a_failure(run_ranks: RunRanks) -> None:
    with pytest.raises(WorldError, match="Rank 1 raised SystemExit: 3"):
        run_ranks(2, lambda rank: exit(3) if rank else dist.barrier())


def _interrupt_soon() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def takes_interrupts() -> Iterator[None]:
    """A shell starts its background jobs without Ctrl-C; these tests would then never end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("takes_interrupts")
def test_interrupt_unwinds_all_ranks_and_restores_globals(run_ranks: RunRanks) -> None:
    """Ctrl-C reaches the main thread while ranks run; all of them end before it goes on."""
    owner = SimpleNamespace(value="outside")
    threads = set(threading.enumerate())
    unwound: list[int] = []

    def body(rank: int) -> None:
        owner.value = f"rank {rank}"
        try:
            dist.barrier()
            if rank == 0:
                _interrupt_soon()
            while True:
                dist.all_reduce(torch.ones(1))
        finally:
            unwound.append(rank)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, body, state=[RankState(owner=owner, name="value")])
    assert sorted(unwound) == [0, 1, 2]
    assert owner.value == "outside"
    assert set(threading.enumerate()) == threads


@pytest.mark.slow
@pytest.mark.usefixtures("takes_interrupts")
def test_interrupt_stops_a_rank_that_never_communicates(run_ranks: RunRanks) -> None:
    """A rank in an endless loop is stopped from outside after a moment of grace."""

    def body(rank: int) -> None:
        _interrupt_soon()
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, body)


def test_world_error_survives_a_pipe() -> None:
    """The forked half of a run hands its error over whole."""
    error = WorldError(
        "Problem.",
        kind=ErrorKind.MISMATCH,
        rank=1,
        standing=["rank 0: running"],
        replay="again",
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kind, copy.rank, copy.standing) == (
        str(error),
        ErrorKind.MISMATCH,
        error.rank,
        error.standing,
    )


# -- faults -----------------------------------------------------------------------------------


def _train(rank: int) -> None:
    """Equal sizes everywhere: only the order and the unit tell collectives apart."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for unit in ("layers.0", "layers.1", "layers.2"):
        active_device().recorder.unit = unit
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), group=pairs[rank // 2])


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("kind", [SkipCollective, SwapCollectives])
def test_every_fault_is_reported_with_the_faulty_rank(
    run_ranks: RunRanks, kind: type, index: int
) -> None:
    """A skipped or swapped collective never passes, wherever it is, and is reported at once."""
    if kind is SwapCollectives and index == 5:
        pytest.skip("nothing follows the last collective")
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_ranks(4, _train, faults=[kind(rank=2, index=index)])
    assert time.monotonic() - started < 1
    assert caught.value.problem.startswith(
        ("Collective #", "Deadlock: ", "All ranks finished, but")
    )
    assert "rank 2" in str(caught.value)
    assert len(caught.value.standing) == 4


def test_skipped_collective_names_both_ranks(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        for unit in ("layers.0", "layers.1"):
            active_device().recorder.unit = unit
            dist.all_reduce(torch.ones(2))

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body, faults=[SkipCollective(rank=1, index=0)])
    assert caught.value.problem in (
        (
            "Collective #0 of group '0' does not match: rank 0 calls all_reduce, rank 1 calls "
            "all_reduce (FSDP unit: expected layers.0, got layers.1)."
        ),
        (
            "Collective #0 of group '0' does not match: rank 1 calls all_reduce, rank 0 calls "
            "all_reduce (FSDP unit: expected layers.1, got layers.0)."
        ),
    )


def test_swapped_collectives_of_two_groups_are_a_deadlock(run_ranks: RunRanks) -> None:
    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(WorldError) as caught:
        run_ranks(2, body, faults=[SwapCollectives(rank=1, index=0)])
    assert str(caught.value).splitlines() == [
        "Deadlock: no rank can go on; waiting: 0, 1.",
        "  rank 0: in all_reduce #0 of group '1' (ranks [0, 1]), waits for rank 1",
        "  rank 1: in all_reduce #0 of group '2' (ranks [0, 1]), waits for rank 0",
    ]


def test_fault_that_never_comes_up_is_missed(run_ranks: RunRanks) -> None:
    """A fault that disturbs nothing would make a test of it pass for no reason."""
    with pytest.raises(WorldError) as caught:
        run_ranks(2, lambda rank: dist.barrier(), faults=[SkipCollective(rank=1, index=1)])
    assert caught.value.problem == (
        "All ranks finished, but fault 'skip-collective rank=1 index=1' never came up in 1 "
        "collectives."
    )


def test_fault_of_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a fault of rank 0 to 1"):
        World(2, faults=[SkipCollective(rank=2, index=0)])
