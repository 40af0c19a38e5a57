"""Norm and clipping of a job whose gradients can be gathered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core import parallel_state

_EPSILON = 1e-6  # as in Megatron's own clipping


def norm_of(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the norm over all parameters of all ranks, from one rank's full gradients.

    Collective over the expert-parallel ranks, each of which holds other experts.
    """
    squares = torch.zeros(2, device="cuda")
    for name, gradient in gradients.items():
        squares[int(".experts." in name)] += gradient.float().square().sum()
    expert = squares[1].clone()
    torch.distributed.all_reduce(expert, group=parallel_state.get_expert_model_parallel_group())
    return (squares[0] + expert).sqrt()


def clip(shards: Iterable[torch.Tensor], norm: torch.Tensor, largest: float) -> None:
    """Scales gradient shards so that a larger `norm` becomes `largest`; 0 leaves them."""
    if largest:
        coefficient = (largest / (norm + _EPSILON)).clamp(max=1.0)
        for shard in shards:
            shard.mul_(coefficient)
