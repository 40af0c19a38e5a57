"""Makes an optimizer of sharded parameters refresh the model weights, in one order on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import fully_shard_optimizer
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group import (
    FsdpParameterGroup,
)

from real.mcore.internals.lifetime import group_of


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer of sharded parameters refresh the model weights after each step.

    MFSDP's own hook does that in the order of a set of objects, which differs from rank to rank:
    where the refresh is a collective (sharded outer axis), ranks then gather different units at the
    same time. The order here is that of the optimizer's parameters.
    """
    before = set(optimizer._optimizer_step_post_hooks)
    fully_shard_optimizer(optimizer)
    (key,) = set(optimizer._optimizer_step_post_hooks) - before
    released_hook = optimizer._optimizer_step_post_hooks[key]
    released_sync = FsdpParameterGroup.sync_model_weight_from_main_weight

    def refresh(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stale: list[FsdpParameterGroup] = []
        FsdpParameterGroup.sync_model_weight_from_main_weight = lambda group: stale.append(group)
        try:
            released_hook(stepped, args, kwargs)
        finally:
            FsdpParameterGroup.sync_model_weight_from_main_weight = released_sync
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        for group in dict.fromkeys(group_of(parameter) for parameter in parameters):
            if group is not None and group in stale:
                group.sync_model_weight_from_main_weight()

    optimizer._optimizer_step_post_hooks[key] = refresh
