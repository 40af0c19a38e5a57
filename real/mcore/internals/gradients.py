"""Reads reduced gradients and main weights out of MFSDP's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import Flat
from torch import nn

from real.mcore.internals.units import is_fsdp_module


class GradientShard(NamedTuple):
    """This rank's part of the gradients of one parameter group.

    Attributes:
        unit: Name of the unit.
        tensors: One view a parameter, of the rows that this rank holds; without padding.
        groups: Process groups over which the parts of one gradient are spread.
    """

    unit: str
    tensors: list[torch.Tensor]
    groups: tuple[torch.distributed.ProcessGroup, ...]


def gradient_shards(root: nn.Module) -> Iterator[GradientShard]:
    """Yields the reduced gradients of every trainable parameter group, in unit order.

    Raises:
        RuntimeError: A gradient is not reduced over the outer axis of a hybrid mesh yet.
    """
    for name, group in _trainable_groups(root):
        if group.sharded_parameters[0].grad is None:
            continue
        buffer = group.main_grad
        if buffer.placements != group.main_weight.placements:
            raise RuntimeError(
                f"Expected the gradients of FSDP unit {name or '<root>'!r} reduced over every "
                "axis, got them before the last microbatch."
            )
        tensors = [buffer.get_local_tensor(i) for i in range(len(group.parameter_names))]
        axes = [i for i, placement in enumerate(buffer.placements) if isinstance(placement, Flat)]
        yield GradientShard(
            name,
            [tensor for tensor in tensors if tensor.numel()] or tensors[:1],
            tuple(buffer.mesh.get_group(axis) for axis in axes),
        )


def full_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the reduced gradient of every trainable parameter, by full name.

    Shards of MFSDP v2 are uneven, which DTensor cannot gather; the buffers that hold them can.
    Collective: every rank of the units' meshes must call it. Shapes are the parameters' own.

    Raises:
        RuntimeError: A gradient is missing.
    """
    gradients: dict[str, torch.Tensor] = {}
    for unit_name, group in _trainable_groups(root):
        for name, parameter in zip(group.parameter_names, group.sharded_parameters, strict=True):
            if parameter.grad is None:
                raise RuntimeError(f"Expected a gradient of {unit_name}.{name}, got none.")
        gradients.update(_gather(unit_name, group, group.main_grad))
    return gradients


def full_weights(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the main weight of every trainable parameter, by full name. Collective."""
    weights: dict[str, torch.Tensor] = {}
    for unit_name, group in _trainable_groups(root):
        weights.update(_gather(unit_name, group, group.main_weight))
    return weights


def _trainable_groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        if is_fsdp_module(module):
            for group in module._parameter_groups:
                if group.requires_grad:
                    yield name, group


def _gather(unit_name: str, group: Any, buffer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for axis in range(buffer.mesh.ndim):  # outer axis first: sharded axes stay a suffix
        if isinstance(buffer.placements[axis], Flat):
            buffer = buffer.allgather(axis)
    for index, name in enumerate(group.parameter_names):
        full_name = f"{unit_name}.{name}" if unit_name else name
        yield full_name, buffer.get_local_tensor(index).detach().clone()
