"""Small modules for cases that need no Megatron, and how they become MFSDP units.

The model has the parts that the adapter looks for: `embedding` first, `decoder.layers` with `attn`
and `mlp` each, `output` last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

WIDTH: Final = 8


class Part(nn.Linear):
    """A small linear layer in bf16 without a bias.

    Attributes:
        is_idle: Whether it has nothing to learn from: its weight then gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.is_idle = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Computes."""
        return nn.functional.linear(value, self.weight.detach() if self.is_idle else self.weight)


class Layer(nn.Module):
    """Two parts that the schedule calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Part()
        self.mlp = Part()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Runs both parts, for a caller who calls the layer as a whole."""
        output: torch.Tensor = self.mlp(self.attn(value))
        return output


class Experts(nn.Module):
    """Owns its weight itself and has no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Adds what the experts make of their tokens."""
        return value + nn.functional.linear(value, self.weight)


class Vocabulary(nn.Module):
    """Stands for an embedding, or an output projection, with far more rows than a layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8 * WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a value of the width that it was given."""
        scores = nn.functional.linear(value, self.weight)
        return scores.view(*value.shape[:-1], WIDTH, -1).sum(-1)


class Chunk(nn.Module):
    """A model, or a pipeline stage of one.

    Args:
        num_layers: Layers.
        first_layer: Number of the first one in the whole model.
        has_embedding: Whether it is a first stage.
        has_output: Whether it is a last stage.
        has_experts: Whether each layer ends with experts, a unit of their own.
    """

    def __init__(
        self,
        num_layers: int = 2,
        *,
        first_layer: int = 0,
        has_embedding: bool = True,
        has_output: bool = True,
        has_experts: bool = False,
    ) -> None:
        super().__init__()
        if has_embedding:
            self.embedding = Part()
        self.decoder = nn.Module()
        numbers = range(first_layer, first_layer + num_layers)
        self.decoder.layers = nn.ModuleDict({str(number): Layer() for number in numbers})
        if has_experts:
            for layer in self.decoder.layers.values():
                layer.experts = Experts()
        if has_output:
            self.output = Part()


def dense_mesh(num_outer: int = 1) -> Any:
    """Returns a mesh of all ranks: one axis, or an outer and an inner one."""
    from torch.distributed.device_mesh import init_device_mesh

    size = torch.distributed.get_world_size()
    if num_outer == 1:
        return init_device_mesh("cuda", (size,), mesh_dim_names=("dp",))
    return init_device_mesh(
        "cuda", (num_outer, size // num_outer), mesh_dim_names=("dp_outer", "dp")
    )


def shard(module: nn.Module, mesh: Any, *, is_outer_sharded: bool = False) -> None:
    """Makes a module an MFSDP v2 unit with the adapter's own placements and types."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import fully_shard
    from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import (
        MixedPrecisionPolicy,
    )

    from real.mcore.shard import placements_of

    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    fully_shard(module, mesh, placements_of(mesh, is_outer_sharded), mixed_precision_policy=policy)


def shard_chunk(chunk: nn.Module, mesh: Any, *, is_outer_sharded: bool = False) -> None:
    """Makes units of the experts, of the layers and of the rest."""
    for layer in chunk.get_submodule("decoder.layers").children():
        if hasattr(layer, "experts"):
            shard(layer.get_submodule("experts"), mesh, is_outer_sharded=is_outer_sharded)
        shard(layer, mesh, is_outer_sharded=is_outer_sharded)
    shard(chunk, mesh, is_outer_sharded=is_outer_sharded)


def share_context(chunks: Sequence[Any]) -> None:
    """Gives all chunks of a model the context of the first one."""
    first = chunks[0]
    first._lazy_init_context()
    for chunk in chunks[1:]:
        for name, module in chunk.named_modules():
            if hasattr(module, "_lazy_init_context"):
                module._context, module._name = first._context, name
