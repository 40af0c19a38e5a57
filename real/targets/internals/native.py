"""Reads MFSDP v2 units of a tree that has its own wrapper for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

_MFSDP: Final = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental"
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (
        "FullyShardedDataParallel",
        "FullyShardedDataParallelV2",
    ),
    f"{_MFSDP}.module": (
        "FsdpModule._unshard_parameter_groups",
        "FsdpModule._reshard_parameter_groups",
        "FsdpModule._reduce_gradient_groups",
    ),
    f"{_MFSDP}.parameter_group": ("FsdpParameter", "FsdpParameterGroup"),
    f"{_MFSDP}.dbuffer": ("DBuffer.allgather", "DBuffer.get_local_tensor"),
}


def missing_names() -> list[str]:
    """Returns what the imported tree lacks of what this module needs."""
    return [
        f"{module}.{name}"
        for module, names in _NEEDED.items()
        for name in names
        if not _has(module, name)
    ]


def _has(module: str, name: str) -> bool:
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner is not None


def units_of(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of every unit under `root`, and of `root`."""
    unit_type = importlib.import_module(f"{_MFSDP}.module").FsdpModule
    for name, module in root.named_modules():
        if isinstance(module, unit_type):
            yield name, module


def full_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the reduced gradient of every trainable parameter, by full name. Collective."""
    return dict(_gathered(root, "main_grad"))


def full_weights(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the main weight of every trainable parameter, by full name. Collective."""
    return dict(_gathered(root, "main_weight"))


def gradient_shards(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yields this rank's part of the reduced gradients, one tensor a parameter group."""
    for _, group in _trainable_groups(root):
        yield group.main_grad.local_buffer


def _trainable_groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in units_of(root):
        for group in module.parameter_groups:
            if group.requires_grad:
                yield name, group


def _gathered(root: nn.Module, attribute: str) -> Iterator[tuple[str, torch.Tensor]]:
    for unit, group in _trainable_groups(root):
        buffer = getattr(group, attribute)
        for axis in range(buffer.mesh.ndim):
            if not _is_whole(buffer.placements[axis]):
                buffer = buffer.allgather(axis)
        for index, parameter in enumerate(group.fsdp_parameters):
            tensor = buffer.get_local_tensor(index).detach().float().clone()
            for local in parameter.fqns:
                yield (f"{unit}.{local}" if unit else local), tensor


def _is_whole(placement: Any) -> bool:
    return type(placement).__name__ == "Replicate"
