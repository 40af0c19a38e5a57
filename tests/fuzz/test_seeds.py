"""Seeds: the same ones do the same, a correct run survives them, and what fails is shrunk."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import pytest
from pytest_mock import MockerFixture

from real.config import Scenario
from sim.faults import DropWait, LoseCallback, parse_fault
from sim.fuzz import run as fuzz_run
from sim.fuzz import seeds as fuzz_seeds
from sim.fuzz.run import FuzzResult, fuzz
from sim.fuzz.seeds import Setting, draw_delays
from sim.fuzz.shrink import minimise, scenario_flags
from sim.session import world
from sim.session.rank import RankPlan


def quick(small: Scenario, **options: Any) -> Setting:  # noqa: ANN401 - fields of a setting
    return Setting(scenario=small, has_reference=False, **options)


def without_time(result: FuzzResult) -> FuzzResult:
    return dataclasses.replace(result, wall_s=0.0)


@pytest.mark.slow
def test_a_correct_run_survives_and_one_seed_is_one_result(small: Scenario) -> None:
    """Two processes or one, and with kernels in a seed or not."""
    setting = quick(small, kernels_every=2)
    first = fuzz(setting, range(5, 9), jobs=2)
    assert first.failures == ()
    assert first.num_seeds == 4
    assert first.num_turn_orders >= 3
    assert first.num_device_orders == 8
    assert without_time(first) == without_time(fuzz(setting, range(5, 9), jobs=1))


@pytest.mark.slow
def test_what_depends_on_turns_is_found_and_shrunk(small: Scenario, mocker: MockerFixture) -> None:
    """A global that ranks share: who comes first writes another trace."""
    arrived: list[int] = []
    real = world.run_rank

    def run_rank(
        scenario: Scenario,
        plan: RankPlan,
        rank: int,
        **options: Any,  # noqa: ANN401
    ) -> object:
        arrived.append(rank)
        changed = scenario.changed(seed=len(arrived) if rank == 0 else 2)
        return real(scenario if arrived[0] == 1 else changed, plan, rank, **options)

    mocker.patch.object(world, "run_rank", run_rank)
    make = fuzz_seeds.make_baseline

    def start_over(*arguments: Any, **options: Any) -> object:  # noqa: ANN401
        arrived.clear()
        return make(*arguments, **options)

    mocker.patch.object(fuzz_run, "make_baseline", start_over)
    once = fuzz_seeds.run_once

    def run_once(*arguments: Any, **options: Any) -> object:  # noqa: ANN401
        arrived.clear()
        return once(*arguments, **options)

    mocker.patch.object(fuzz_seeds, "run_once", run_once)
    setting = quick(small.changed(num_microbatches=2), num_orders=0)
    result = fuzz(setting, range(12), jobs=2)
    [failure] = result.failures
    assert failure.kind == "trace differs"
    assert failure.seed is not None
    assert failure.problem.startswith("Record 0 of rank ")
    assert result.shrunk is not None
    assert result.shrunk.setting.scenario == small
    assert result.shrunk.failure.seed == failure.seed


@pytest.mark.slow
def test_a_fault_fails_the_first_run_and_is_shrunk_to_itself(small: Scenario) -> None:
    """Of two faults the one that matters stays, in the smallest scenario that has it."""
    faults = (
        parse_fault("delay-rank rank=0 at=0 turns=5"),
        parse_fault("drop-wait rank=1 stream=compute on=all_gather"),
    )
    setting = quick(small.changed(num_layers=2), faults=faults)
    result = fuzz(setting, range(2))
    assert [(f.seed, f.kind) for f in result.failures] == [(None, "check I1")]
    assert result.shrunk is not None
    assert result.shrunk.setting.scenario == small
    assert result.shrunk.setting.faults == faults[1:]


def test_a_seed_that_kills_its_process_fails_alone(small: Scenario, mocker: MockerFixture) -> None:
    real = fuzz_seeds.run_seed

    def run_seed(setting: Setting, baseline: Any, seed: int) -> object:  # noqa: ANN401
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(setting, baseline, seed)

    mocker.patch.object(fuzz_run, "_run_seed", run_seed)
    setting = quick(small, num_orders=1)
    result = fuzz(setting, range(3), max_failures=2, shrinks=False)
    assert result.num_seeds == 3
    assert [(f.seed, f.kind) for f in result.failures] == [(1, "process ended")]
    assert "exit -9" in result.failures[0].problem


def test_delays_of_a_seed_are_its_own() -> None:
    draws = [draw_delays(seed, world_size=4, num_switches=100) for seed in range(50)]
    assert draws == [draw_delays(seed, world_size=4, num_switches=100) for seed in range(50)]
    assert {len(delays) for delays in draws} == {0, 1, 2, 3}
    assert {delay.rank for delays in draws for delay in delays} == {0, 1, 2, 3}
    assert all(delay.at <= 100 and 1 <= delay.turns <= 51 for d in draws for delay in d)


# -- shrinking --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        ({}, (1, 1, 1, 2)),
        ({"num_layers": 3}, (1, 1, 3, 2)),
        ({"train_iters": 2, "num_microbatches": 4}, (2, 4, 1, 2)),
        ({"world_size": 3, "num_layers": 2}, (1, 1, 2, 4)),
    ],
)
def test_shrinking_reaches_the_least_that_fails(
    least: dict[str, int], expected: tuple[int, int, int, int]
) -> None:
    """World sizes are multiples of the expert-parallel size."""
    tried = []

    def fails(setting: Setting) -> bool:
        tried.append(setting)
        return all(getattr(setting.scenario, name) >= value for name, value in least.items())

    scenario = minimise(Setting(scenario=Scenario()), fails).scenario
    found = (
        scenario.train_iters,
        scenario.num_microbatches,
        scenario.num_layers,
        scenario.world_size,
    )
    assert found == expected
    assert len(tried) < 30


def test_shrinking_keeps_the_faults_that_matter_and_their_ranks() -> None:
    faults = (DropWait(rank=1), LoseCallback(rank=2), DropWait(rank=0, n=3))
    setting = Setting(scenario=Scenario(), faults=faults)
    found = minimise(setting, lambda candidate: faults[1] in candidate.faults)
    assert found.faults == faults[1:2]
    assert found.scenario.world_size == 4  # rank 2 must be there


def test_shrinking_takes_the_layer_kinds_along() -> None:
    setting = Setting(scenario=Scenario(moe_layer_freq="0,1,1,1"))
    found = minimise(setting, lambda candidate: candidate.scenario.num_layers >= 2)
    assert found.scenario.moe_layer_freq == "0,1"


def test_flags_say_how_a_scenario_differs() -> None:
    changed = Scenario(num_layers=2, prefetch="both", overlap_moe_expert_parallel_comm=False)
    assert list(scenario_flags(Scenario(), changed)) == [
        "--num-layers",
        "2",
        "--no-overlap-moe-expert-parallel-comm",
        "--prefetch",
        "both",
    ]
