"""Reads MFSDP v2 units of a tree that has its own wrapper for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from real.mcore import versions
from real.targets.records import record_name, record_parameter, record_roles, record_unit
from real.watch.points import Point
from real.watch.records import UnitView, reduce_point, reshard_point, unshard_point

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
    return versions.missing_names(_NEEDED)


def units_of(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of every unit under `root`, and of `root`."""
    unit_type = _unit_type()
    for name, module in root.named_modules():
        if isinstance(module, unit_type):
            yield name, module


def _unit_type() -> Any:
    return importlib.import_module(f"{_MFSDP}.module").FsdpModule


_VIEW: Final = UnitView(
    name=lambda unit: unit._name or "",
    is_gathered=lambda unit: unit._unshard_event is not None,
    is_last_microbatch=lambda unit: bool(unit.context.is_last_microbatch),
    gradients=lambda unit: {
        name: parameter.unsharded.grad is not None
        for group in unit.parameter_groups
        if group.requires_grad
        for parameter in group.fsdp_parameters
        for name in _full_names(unit._name, parameter)[:1]
    },
    version=lambda unit: sum(
        tensor._version
        for group in unit.parameter_groups
        for tensor in (
            group._unsharded_model_weight.local_buffer,
            *(parameter.unsharded for parameter in group.fsdp_parameters),
        )
    ),
)


def points() -> Sequence[Point]:
    """Returns what to watch of the tree's MFSDP v2."""
    unit_type = _unit_type()
    return (
        unshard_point(unit_type, "_unshard_parameter_groups", _VIEW),
        reshard_point(unit_type, "_reshard_parameter_groups", _VIEW),
        reduce_point(unit_type, "_reduce_gradient_groups", _VIEW),
    )


def describe(root: Any) -> None:
    """Records the units, parameters, streams and buffers of a model."""
    record_roles(root.context.allgather_stream, root.context.reduce_scatter_stream)
    for name, module in units_of(root):
        _describe_unit(name, module)


def _describe_unit(unit: str, module: Any) -> None:
    groups = module.parameter_groups
    ranks = groups[0].mesh.mesh.flatten().tolist() if groups else []
    full = [group._unsharded_model_weight.local_buffer for group in groups]
    record_unit(
        unit,
        parameters=[p.unsharded for group in groups for p in group.fsdp_parameters],
        num_bytes=sum(buffer.numel() * buffer.element_size() for buffer in full),
        ranks=[int(rank) for rank in ranks],
        divisor=groups[0].grad_divisor if groups else 1,
    )
    for group in groups:
        for parameter in group.fsdp_parameters:
            record_parameter(unit, _full_names(unit, parameter), parameter.unsharded)
        for kind, buffer in (
            ("full weight", group._unsharded_model_weight),
            ("model weight", group.model_weight),
            ("main weight", group.main_weight),
            ("main gradient", group.main_grad),
        ):
            if buffer is not None:
                record_name(unit, kind, buffer.local_buffer)


def _full_names(unit: str | None, parameter: Any) -> list[str]:
    return [f"{unit}.{local}" if unit else local for local in parameter.fqns]


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
            for name in _full_names(unit, parameter)[:1]:
                yield name, tensor


def _is_whole(placement: Any) -> bool:
    return type(placement).__name__ == "Replicate"
