"""Shards a Megatron model: experts on the expert-data-parallel mesh, then layers, then the root."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
    Flat,
    Placements,
    fully_shard,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup


def mesh_of(group: ProcessGroup, name: str) -> DeviceMesh:
    """Returns the one-axis mesh of an existing process group."""
    return DeviceMesh.from_group(group, "cuda", mesh_dim_names=(name,))


def shard_model(
    model: nn.Module,
    *,
    dense_mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    expert_parallel_size: int,
    main_grads_dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Makes MFSDP v2 units of a model, inside out, and returns their gradient divisors.

    Experts go first, on their own mesh: a layer would claim them for the dense mesh. Their
    gradients already sum the tokens of all expert-parallel ranks while the mesh averages over the
    expert-data-parallel ranks only, so they are divided by the expert-parallel size.

    Args:
        model: A Megatron model with `decoder.layers`.
        dense_mesh: Mesh of all data-parallel ranks.
        expert_mesh: Mesh of the ranks that hold the same experts.
        expert_parallel_size: Number of ranks that the experts are spread over.
        main_grads_dtype: Element type of the accumulated gradients.
    """
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=main_grads_dtype
    )
    divisors: dict[str, int] = {}
    for name, layer in model.decoder.layers.named_children():
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        if experts is not None:
            _shard(experts, expert_mesh, policy)
            divisors[f"decoder.layers.{name}.mlp.experts"] = expert_parallel_size
        _shard(layer, dense_mesh, policy)
    _shard(model, dense_mesh, policy)
    return divisors


def _shard(module: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    flat = [Flat()] * mesh.ndim
    placements = Placements(
        dp_axes=list(mesh.mesh_dim_names or ()), parameter=flat, gradient=flat, optimizer=flat
    )
    fully_shard(module, mesh, placements, mixed_precision_policy=policy)
