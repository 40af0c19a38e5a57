"""Megatron models with unusual parameters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from real.config import Scenario
from sim.cases.worlds import Defect, all_of, replaced, run_scenario
from sim.checks import Violation


class SometimesUsed(torch.nn.Module):
    """Adds nothing to its input; reads its weight on even ranks in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        self.num_calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value`."""
        self.num_calls += 1
        is_even_rank = torch.distributed.get_rank() % 2 == 0
        if is_even_rank and self.num_calls % 2:
            return value + 0.0 * self.weight.sum()
        return value


def sometimes_used(scenario: Scenario, *, defect: Defect = nullcontext) -> list[Violation]:
    """Runs a scenario whose first layer has a weight that not every microbatch uses."""

    def make(original: Any) -> Any:
        def build(config: Any, scenario: Scenario) -> Any:
            model = original(config, scenario)
            layer = model.decoder.layers[0]
            layer.input_layernorm = torch.nn.Sequential(SometimesUsed(), layer.input_layernorm)
            return model

        return build

    # Without a reference: its model is built by the same function, but cached under the scenario.
    return run_scenario(
        scenario,
        defect=lambda: all_of(replaced("real.mcore.jobs.build_model", make), defect()),
        compares=False,
    )
