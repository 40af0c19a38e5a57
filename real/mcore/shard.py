"""Shards a Megatron model: experts on the expert-data-parallel mesh, then layers, then the root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import Placements


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The meshes of one rank.

    Attributes:
        dense: All data-parallel ranks; one axis, or outer and inner.
        expert: The ranks that hold the same experts; as many axes as `dense`.
        is_outer_sharded: Whether the optimizer state is sharded over the outer axis (HFSDP); else
            the outer axis holds replicas (HSDP).
    """

    dense: DeviceMesh
    expert: DeviceMesh
    is_outer_sharded: bool = False


def make_meshes(*, num_outer: int = 1, is_outer_sharded: bool = False) -> Meshes:
    """Makes meshes from Megatron's process groups, which must be initialized.

    Args:
        num_outer: Size of the outer axis, as given to `initialize_model_parallel` as
            `num_distributed_optimizer_instances`; 1 for a mesh of one axis.
        is_outer_sharded: See `Meshes`.
    """
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    if num_outer == 1:
        return Meshes(
            dense=DeviceMesh.from_group(dense, "cuda", mesh_dim_names=("dp",)),
            expert=DeviceMesh.from_group(expert, "cuda", mesh_dim_names=("expert_dp",)),
        )
    outer = parallel_state.get_inter_distributed_optimizer_instance_group()
    return Meshes(
        dense=_hybrid_mesh(
            outer,
            parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            ),
            dense,
            num_outer,
        ),
        expert=_hybrid_mesh(
            outer,
            parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            expert,
            num_outer,
        ),
        is_outer_sharded=is_outer_sharded,
    )


def _hybrid_mesh(
    outer: ProcessGroup, inner: ProcessGroup, whole: ProcessGroup, num_outer: int
) -> DeviceMesh:
    ranks = torch.tensor(torch.distributed.get_process_group_ranks(whole)).view(num_outer, -1)
    return DeviceMesh.from_group(
        [outer, inner], "cuda", mesh=ranks, mesh_dim_names=("dp_outer", "dp")
    )


def shard_model(
    model: nn.Module,
    meshes: Meshes,
    *,
    expert_parallel_size: int,
    main_grads_dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Makes MFSDP v2 units of a model, inside out, and returns their gradient divisors.

    Experts go first, on their own mesh: a layer would claim them for the dense mesh. Their
    gradients already sum the tokens of all expert-parallel ranks while the mesh averages over the
    expert-data-parallel ranks only, so they are divided by the expert-parallel size.

    Args:
        model: A Megatron model with `decoder.layers`, and `mtp.layers` if it predicts further.
        meshes: The meshes of this rank.
        expert_parallel_size: Number of ranks that the experts are spread over.
        main_grads_dtype: Element type of the accumulated gradients.
    """
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=main_grads_dtype
    )
    divisors: dict[str, int] = {}
    for name, layer in _transformer_layers(model):
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        if experts is not None:
            _shard(experts, meshes.expert, meshes.is_outer_sharded, policy)
            divisors[f"{name}.mlp.experts"] = expert_parallel_size
        _shard(layer, meshes.dense, meshes.is_outer_sharded, policy)
    _shard(model, meshes.dense, meshes.is_outer_sharded, policy)
    return divisors


def _transformer_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model.decoder.layers.named_children():
        yield f"decoder.layers.{name}", layer
    mtp = getattr(model, "mtp", None)
    if mtp is not None:
        for name, layer in mtp.layers.named_children():
            yield f"mtp.layers.{name}.mtp_model_layer", layer.mtp_model_layer


def _shard(
    module: nn.Module, mesh: DeviceMesh, is_outer_sharded: bool, policy: MixedPrecisionPolicy
) -> None:
    # Imported late: trees of other kinds have other names, and are trained without this function.
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import fully_shard

    fully_shard(module, mesh, placements_of(mesh, is_outer_sharded), mixed_precision_policy=policy)


def placements_of(mesh: DeviceMesh, is_outer_sharded: bool) -> Placements:
    """Returns how parameters, gradients and optimizer state lie on a mesh of one or two axes."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
        Flat,
        Partial,
        Placements,
        Replicate,
    )

    axes = list(mesh.mesh_dim_names or ())
    if mesh.ndim == 1:
        flat = [Flat()]
        return Placements(dp_axes=axes, parameter=flat, gradient=flat, optimizer=flat)
    return Placements(
        dp_axes=axes,
        parameter=[Replicate(), Flat()],
        # Between microbatches the outer axis holds unreduced averages.
        gradient=[Partial(torch.distributed.ReduceOp.AVG), Flat()],
        optimizer=[Flat() if is_outer_sharded else Replicate(), Flat()],
    )
