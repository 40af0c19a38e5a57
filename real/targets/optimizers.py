"""Megatron's own optimizer of a scenario."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from real.config import Scenario
from real.targets.base import TargetError


def megatron_optimizer(
    scenario: Scenario, model: Any, *, is_distributed: bool, process_groups: Any = None
) -> Any:
    """Returns Megatron's optimizer for a wrapped model; it does not clip.

    Args:
        scenario: The run.
        model: The model in its data-parallel wrapper.
        is_distributed: Whether Megatron calls it a distributed optimizer.
        process_groups: Megatron's collection of groups; None for its global ones.

    Raises:
        TargetError: Megatron's distributed optimizer does not take the scenario's.
    """
    if is_distributed and scenario.optimizer != "adam":
        raise TargetError(
            "Expected optimizer of adam (Megatron's distributed optimizer takes no other of the "
            f"scenario's), got {scenario.optimizer}; add --optimizer adam."
        )
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=scenario.optimizer,
            lr=scenario.lr,
            weight_decay=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=is_distributed,
            clip_grad=0.0,
            sgd_momentum=0.0,
        ),
        [model],
        use_gloo_process_groups=False,
        pg_collection=process_groups,
    )


def step(optimizer: Any) -> None:
    """Steps Megatron's optimizer.

    Raises:
        RuntimeError: A gradient is not finite.
    """
    has_updated, _, _ = optimizer.step()
    if not has_updated:
        raise RuntimeError("Expected finite gradients, got others: no weight was updated.")
