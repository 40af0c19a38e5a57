"""Evaluation between optimizer steps leaves training as it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture

from real.config import Scenario
from sim.quiet import quiet
from sim.session.megatron import megatron_on_fake_cuda
from sim.session.options import RunOptions
from sim.session.run import run_in_process


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"delay_wgrad_compute": True, "prefetch": "both"},
        {"overlap_moe_expert_parallel_comm": False},
        {"overlap_moe_expert_parallel_comm": False, "fine_grained_hooks": True},
    ],
    ids=["combined", "delayed", "plain", "plain with our hooks"],
)
def test_evaluation_between_steps_changes_nothing(
    mocker: MockerFixture, schedule: dict[str, Any]
) -> None:
    """Losses of evaluation equal the reference's, and every unit rests again after it."""
    scenario = Scenario(
        num_layers=2, num_microbatches=2, train_iters=3, transformer_impl="transformer_engine"
    ).changed(**schedule)
    evaluated: dict[str, list[float]] = {}
    with warnings.catch_warnings():
        quiet()
        with megatron_on_fake_cuda():
            from real.mcore import jobs
            from real.mcore.training import run_step

            train = jobs._run_step

            def train_and_evaluate(job: Any, step: int) -> Any:  # noqa: ANN401 - Megatron's
                output = train(job, step)
                with torch.no_grad():
                    loss = run_step(job.model, scenario, 100 + step, is_evaluation=True)
                evaluated.setdefault(type(job).__name__, []).append(loss)
                return output

            mocker.patch.object(jobs, "_run_step", train_and_evaluate)
            mocker.patch("sim.session.run.can_fork", return_value=False)
            result = run_in_process(scenario, RunOptions(kernel_steps=[1]))
    assert result.problems() == []
    assert len(evaluated["FsdpJob"]) == len(evaluated["ReferenceJob"]) == 3 * scenario.world_size
    for ours, theirs in zip(evaluated["FsdpJob"], evaluated["ReferenceJob"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
