"""Gradient norm and clipping over units that live on different meshes."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.distributed import ProcessGroup

from real.mcore import internals

_EPSILON: Final = 1e-6  # as in Megatron's own clipping


def grad_norm(
    root: nn.Module, *, expert_units: frozenset[str], expert_group: ProcessGroup
) -> torch.Tensor:
    """Returns the norm over all parameters of all ranks, a float32 scalar on the device.

    Shards of one mesh add up over its sharded axes; those of experts also over the ranks that hold
    other experts. Meshes differ, so each kind is summed by itself. Collective; no host sync.

    Args:
        root: The outermost unit's module, after `finish_grad_sync`.
        expert_units: Names of the units whose parameters differ from one expert-parallel rank to
            the next.
        expert_group: The expert-parallel ranks.
    """
    squares: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
    for shard in internals.gradient_shards(root):
        groups = shard.groups + ((expert_group,) if shard.unit in expert_units else ())
        norms = torch._foreach_norm(shard.tensors, dtype=torch.float32)
        squares.setdefault(groups, []).append(torch.stack(norms).square().sum())
    total = torch.zeros((), device="cuda")
    for groups, parts in squares.items():
        square = torch.stack(parts).sum()
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def clip_gradients(root: nn.Module, norm: torch.Tensor, max_norm: float) -> None:
    """Scales every gradient so that a larger `norm` becomes `max_norm`. No host sync.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"Expected a largest norm above 0, got {max_norm}.")
    coefficient = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for shard in internals.gradient_shards(root):
        torch._foreach_mul_(shard.tensors, coefficient)
