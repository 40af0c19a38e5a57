"""A few ranks timed in place of many give the times of the many."""

import pytest
from records import layer_trace

from sim.bench.timing import make_dag
from sim.timing.costs.costfile import load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.engine import run_program
from sim.timing.replay.fold import fold, growing_groups, repeated, replay_folded, unfold
from sim.timing.replay.lower import Conditions, lower
from sim.timing.replay.program import Program, ReplayError

MODEL = CostModel(load_cluster("h100"))


def ends(program: Program) -> dict[int, dict[int, list[int]]]:
    times = run_program(program)
    return {
        each.rank: {stream: found.ends for stream, found in rank.streams.items()}
        for each, rank in zip(program.ranks, times.ranks, strict=True)
    }


def test_equal_ranks_are_one_class() -> None:
    folded, classes = fold(lower(layer_trace(4), MODEL))
    assert classes == {0: [0, 1, 2, 3]}
    assert folded.num_ops * 4 == lower(layer_trace(4), MODEL).num_ops


def test_ranks_that_wait_for_another_kind_of_rank_are_another_class() -> None:
    conditions = Conditions(straggler=2.0)
    _, classes = fold(lower(layer_trace(8), MODEL, conditions=conditions))
    # Rank 0 is slow, rank 1 exchanges tokens with it, the other pairs are undisturbed.
    assert classes == {0: [0], 1: [1], 2: [2, 3, 4, 5, 6, 7]}


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
@pytest.mark.parametrize("straggler", [1.0, 2.0])
def test_folding_changes_no_time(straggler: float, imbalance: float) -> None:
    conditions = Conditions(straggler=straggler, imbalance=imbalance)
    program = lower(layer_trace(8), MODEL, conditions=conditions)
    folded, classes = fold(program)
    assert len(classes) < 8
    whole, few = ends(program), ends(folded)
    for representative, ranks in classes.items():
        for rank in ranks:
            assert whole[rank] == few[representative]


def test_folding_the_bench_changes_no_time() -> None:
    program = make_dag(32, 170)
    folded, classes = fold(program)
    assert list(classes) == [0]
    assert ends(program)[31] == ends(folded)[0]


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
def test_a_repeated_trace_is_timed_as_if_it_had_been_written_out(num_ranks: int) -> None:
    traces = layer_trace(2)
    program = lower(traces, MODEL, place=repeated(traces, MODEL, num_ranks))
    every = unfold(program, growing_groups(traces), 2, num_ranks)
    assert len(every.ranks) == num_ranks
    found = replay_folded(traces, MODEL, num_ranks=num_ranks)
    assert run_program(every).end == found.replay.step_ns
    assert found.num_ranks == num_ranks
    assert len(found.replay.times.ranks) == 1


def test_more_ranks_reach_over_more_nodes() -> None:
    times = [
        replay_folded(layer_trace(2), MODEL, num_ranks=num).replay.step_ns for num in (2, 8, 64)
    ]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_units_groups_grow_and_expert_groups_stay() -> None:
    assert growing_groups(layer_trace(4)) == {"w"}


@pytest.mark.parametrize("num_ranks", [3, 1])
def test_a_number_of_ranks_that_does_not_fit_is_told(num_ranks: int) -> None:
    with pytest.raises(ReplayError, match=f"a multiple of the trace's 2 ranks, got {num_ranks}"):
        replay_folded(layer_trace(2), MODEL, num_ranks=num_ranks)
