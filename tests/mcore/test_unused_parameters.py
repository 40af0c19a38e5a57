"""Parameters that some microbatches, or all, do not use."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture

from real.config import Scenario
from real.trace import MemorySink
from sim.quiet import quiet
from sim.session.megatron import megatron_on_fake_cuda
from sim.session.options import RunOptions
from sim.session.run import run_in_process


class _SometimesUsed(torch.nn.Module):
    """Adds nothing to its input; reads its weight on even ranks in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        self.num_calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        is_even_rank = torch.distributed.get_rank() % 2 == 0
        if is_even_rank and self.num_calls % 2:
            return value + 0.0 * self.weight.sum()
        return value


def with_unused_parameters(build: Any) -> Any:  # noqa: ANN401 - Megatron's builder
    """Wraps a builder: one parameter is never used, another by some ranks and microbatches."""

    def build_more(config: Any, scenario: Scenario) -> Any:  # noqa: ANN401
        model = build(config, scenario)
        model.decoder.layers[0].never_used = torch.nn.Parameter(
            torch.ones(8, 8, dtype=torch.bfloat16)
        )
        norm = model.decoder.layers[1].input_layernorm
        model.decoder.layers[1].input_layernorm = torch.nn.Sequential(_SometimesUsed(), norm)
        return model

    return build_more


@pytest.mark.slow
def test_unused_parameters_are_reduced_as_zeros_by_every_rank(mocker: MockerFixture) -> None:
    """Collectives follow the schedule and not the data, or ranks with other data would hang."""
    scenario = Scenario(num_layers=2, num_microbatches=3, train_iters=2)
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with warnings.catch_warnings():
        quiet()
        with megatron_on_fake_cuda():
            from real.mcore import jobs

            mocker.patch.object(jobs, "build_model", with_unused_parameters(jobs.build_model))
            result = run_in_process(scenario, sinks=sinks, options=RunOptions(kernel_steps=None))
    assert result.problems() == []
    for sink in sinks:
        reduced = Counter(r["unit"] for r in sink.records if r["op"] == "reduce")
        assert set(reduced.values()) == {3 * 2}
        never = [r["zero_filled"] for r in sink.records if r["op"] == "reduce"]
        assert sum(never) >= 3 * 2
