"""Seed in, trace out: the order in which ranks take turns changes neither numbers nor traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from real.config import Scenario, load_scenario
from real.result import RunResult
from real.trace import JsonlSink, trace_path
from sim.commands.common import DEFAULT_SCENARIO
from sim.session.options import RunOptions
from sim.session.run import run_in_process
from sim.world import SkipCollective, SwapCollectives, WorldError

# Megatron and torch warn of their own deprecated names while a model is built.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.fixture(scope="module")
def small() -> Scenario:
    """2 layers, 2 microbatches, 1 step on 4 ranks."""
    scenario = load_scenario(DEFAULT_SCENARIO)
    return scenario.changed(num_layers=2, num_microbatches=2, train_iters=1)


def _run(scenario: Scenario, folder: Path, seed: int) -> tuple[RunResult, list[bytes]]:
    folder.mkdir()
    paths = [trace_path(folder, rank) for rank in range(scenario.world_size)]
    result = run_in_process(
        scenario, RunOptions(schedule_seed=seed), sinks=[JsonlSink(p) for p in paths]
    )
    return result, [path.read_bytes() for path in paths]


def _numbers(result: RunResult) -> RunResult:
    return dataclasses.replace(result, wall_s=0)


def test_equal_seeds_give_equal_bytes(small: Scenario, tmp_path: Path) -> None:
    first, first_traces = _run(small, tmp_path / "first", 0)
    second, second_traces = _run(small, tmp_path / "second", 0)
    assert _numbers(first) == _numbers(second)
    assert first_traces == second_traces
    assert first.problems() == []


@pytest.mark.slow
def test_ten_schedule_seeds_give_equal_results_and_traces(small: Scenario, tmp_path: Path) -> None:
    runs = [_run(small, tmp_path / str(seed), seed) for seed in range(10)]
    for seed, (result, traces) in enumerate(runs):
        assert _numbers(result) == _numbers(runs[0][0]), f"schedule seed {seed}"
        assert traces == runs[0][1], f"schedule seed {seed}"


@pytest.mark.parametrize(
    "fault",
    [
        SkipCollective(rank=1, index=20),
        SkipCollective(rank=3, index=60),
        SwapCollectives(rank=2, index=20),
        SwapCollectives(rank=0, index=61),
    ],
    ids=str,
)
def test_faults_in_a_training_step_name_the_rank(small: Scenario, fault: SkipCollective) -> None:
    """A collective that one rank leaves out or swaps ends the run with all ranks' places."""
    with pytest.raises(WorldError) as caught:
        run_in_process(small, RunOptions(faults=[fault], replay="python -m sim run"))
    assert caught.value.problem.startswith(("Collective #", "Deadlock: "))
    assert f"rank {fault.rank}" in str(caught.value)
    assert len(caught.value.standing) == 4
    assert str(caught.value).endswith("Replay: python -m sim run")
