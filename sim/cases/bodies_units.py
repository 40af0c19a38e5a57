"""Runs a few linear layers under the real adapter and real MFSDP units, node by node.

The nodes run as the combined schedule runs them: every node is an autograd pass of its own over a
detached input, and nobody calls a layer as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from real.trace import OpKind, active_recorder
from sim.cases.bodies_models import (
    WIDTH,
    Chunk,
    Experts,
    Layer,
    Part,
    Vocabulary,
    dense_mesh,
    shard,
    shard_chunk,
    share_context,
)
from sim.cases.worlds import Rank, at_node, replaced
from sim.cuda import active_device

if TYPE_CHECKING:
    from real.mcore.schedule import Mfsdp1F1B

__all__ = [
    "WIDTH",
    "Chunk",
    "Experts",
    "Kernel",
    "Layer",
    "Node",
    "Part",
    "Vocabulary",
    "attributed",
    "begin",
    "dense_mesh",
    "end",
    "expected_gradients",
    "given_to",
    "gradients",
    "make_optimizer",
    "name_storage",
    "optimizer_step",
    "read_gradients",
    "shard",
    "shard_chunk",
    "start",
    "start_all",
    "wrap",
]


class Node:
    """One piece of the schedule: a submodule that is called by itself.

    Attributes:
        name: What the trace calls it.
        layer: Name of its layer, or None.
        module: The submodule.
    """

    def __init__(self, name: str, layer: str | None, module: nn.Module) -> None:
        self.name = name
        self.layer = layer
        self.module = module


def wrap(chunk: nn.Module) -> Mfsdp1F1B:
    """Puts a sharded chunk under the adapter, with our hooks."""
    from real.mcore.schedule import Mfsdp1F1B

    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True, no_sync_func=None)
    return Mfsdp1F1B(config, chunk)


def given_to(rank: int, microbatch: int) -> torch.Tensor:
    """Returns the data of one rank and microbatch."""
    generator = torch.Generator().manual_seed(100 * rank + microbatch + 1)
    return torch.randn(2, WIDTH, generator=generator).to(torch.bfloat16)


def start(
    rank: Rank,
    chunk: nn.Module | None = None,
    *,
    num_outer: int = 1,
    is_outer_sharded: bool = False,
) -> Kernel:
    """Shards a chunk, equal on all ranks, puts it under the adapter and records from here on."""
    if chunk is None:
        torch.manual_seed(1)
        chunk = Chunk()
    [kernel] = start_all(rank, [chunk], num_outer=num_outer, is_outer_sharded=is_outer_sharded)
    return kernel


def start_all(
    rank: Rank,
    chunks: Sequence[nn.Module],
    *,
    num_outer: int = 1,
    is_outer_sharded: bool = False,
    shares_context: bool = False,
) -> list[Kernel]:
    """Does the same with several chunks of one model, each with its own context or one for all."""
    mesh = dense_mesh(num_outer)
    for chunk in chunks:
        shard_chunk(chunk, mesh, is_outer_sharded=is_outer_sharded)
    if shares_context:
        share_context(chunks)
    kernels = [Kernel(wrap(chunk)) for chunk in chunks]
    for kernel in kernels:
        rank.describe(kernel.model)
    rank.observe()
    return kernels


class Kernel:
    """Runs the nodes of one chunk by hand.

    Args:
        model: The chunk under the adapter.
    """

    def __init__(self, model: Mfsdp1F1B) -> None:
        self.model = model
        self.optimizer = make_optimizer([model])
        self.nodes = list(_nodes_of(model.module))
        self._saved: dict[int, list[tuple[Node, torch.Tensor, torch.Tensor]]] = {}

    def forward(self, microbatch: int) -> torch.Tensor:
        """Runs the forward nodes of one microbatch and returns the last output."""
        value = given_to(torch.distributed.get_rank(), microbatch)
        saved = self._saved.setdefault(microbatch, [])
        for i, node in enumerate(self.nodes):
            given = value.detach().requires_grad_()
            with at_node(node.name, "forward", layer=node.layer, microbatch=microbatch):
                value = node.module(given)
            saved.append((node, given, value))
            following = self.nodes[i + 1] if i + 1 < len(self.nodes) else None
            if node.layer is not None and (following is None or following.layer != node.layer):
                self.model.post_forward_release_module(self._layer(node.layer))
        return value

    def backward(self, microbatch: int) -> None:
        """Runs the backward nodes of one microbatch."""
        self.model.pre_backward()
        saved = self._saved.pop(microbatch)
        gradient: torch.Tensor | None = torch.ones_like(saved[-1][2])
        while saved:
            node, given, value = saved.pop()
            with at_node(node.name, "backward", layer=node.layer, microbatch=microbatch):
                torch.autograd.backward(value, gradient)
            gradient = given.grad
            if node.layer is not None and (not saved or saved[-1][0].layer != node.layer):
                self.model.post_backward_release_module(self._layer(node.layer))
        self.model.post_backward()

    def window(self, num_microbatches: int) -> None:
        """Runs one accumulation window in the order of 1F1B: F0, F1 B0, F2 B1, ..., B last."""
        self.forward(0)
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            if is_last:
                self.backward(microbatch)
                continue
            with self.model.no_sync():
                self.forward(microbatch + 1)
                self.backward(microbatch)

    def step(self, number: int, num_microbatches: int = 2) -> None:
        """Runs one optimizer step."""
        begin(number)
        self.window(num_microbatches)
        self.model.finish_grad_sync()
        optimizer_step(self.optimizer)
        end(number)

    def _layer(self, name: str) -> nn.Module:
        layer: nn.Module = self.model.module.get_submodule(name)
        return layer


def _nodes_of(chunk: Any) -> Iterator[Node]:
    if hasattr(chunk, "embedding"):
        yield Node("pre_process", None, chunk.embedding)
    for number, layer in chunk.decoder.layers.items():
        name = f"decoder.layers.{number}"
        yield Node("attn", name, layer.attn)
        yield Node("mlp", name, layer.mlp)
        if hasattr(layer, "experts"):
            yield Node("experts", name, layer.experts)
    if hasattr(chunk, "output"):
        yield Node("post_process", None, chunk.output)


def begin(step: int) -> None:
    """Begins an optimizer step."""
    active_recorder().begin_step(step)


def end(step: int) -> None:
    """Ends an optimizer step."""
    active_recorder().record(OpKind.STEP, step=step, event="end")


def make_optimizer(models: Sequence[Mfsdp1F1B], lr: float = 0.1) -> torch.optim.Optimizer:
    """Returns plain descent over the main weights; each step refreshes the model weights."""
    from real.mcore import internals

    optimizer = torch.optim.SGD(
        [p for model in models for p in model.module.parameters() if p.requires_grad], lr=lr
    )
    internals.shard_optimizer(optimizer)
    return optimizer


def gradients(model: Mfsdp1F1B) -> dict[str, torch.Tensor]:
    """Gathers what the optimizer would see, by full name. Collective."""
    from real.mcore import internals

    return {name: g.float() for name, g in internals.full_gradients(model.module).items()}


def expected_gradients(num_ranks: int, num_microbatches: int) -> dict[str, torch.Tensor]:
    """Returns the default chunk's gradients without FSDP: sum of microbatches, mean of ranks."""
    torch.manual_seed(1)
    chunk = Chunk()
    nodes = list(_nodes_of(chunk))
    totals = {name: torch.zeros(p.shape) for name, p in chunk.named_parameters()}
    for rank in range(num_ranks):
        for microbatch in range(num_microbatches):
            value = given_to(rank, microbatch)
            for node in nodes:
                value = node.module(value)
            value.backward(torch.ones_like(value))
            for name, parameter in chunk.named_parameters():
                assert parameter.grad is not None
                totals[name] += parameter.grad.float() / num_ranks
                parameter.grad = None
    return totals


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps, clears the gradients and records both as the jobs do."""
    read_gradients()
    stream = torch.cuda.current_stream().stream_id
    active_recorder().record(OpKind.OPTIMIZER_STEP, stream=stream)
    optimizer.step()
    optimizer.zero_grad()


def read_gradients() -> None:
    """Records that the current stream reads the gradients."""
    stream = torch.cuda.current_stream().stream_id
    active_recorder().record(OpKind.GRAD_READ, stream=stream, by="optimizer")


def name_storage(tensor: torch.Tensor, unit: str, kind: str) -> None:
    """Names a tensor's storage in the trace as a buffer of a unit."""
    device = active_device()
    storage = device.storage_id(tensor.untyped_storage())
    device.recorder.record(OpKind.NAME, storage=storage, name=f"{unit}:{kind}")


@contextmanager
def attributed() -> Iterator[None]:
    """Attributes the collectives of MFSDP's own hooks to their unit, as ours are."""
    module = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module.FsdpModule"

    def make(original: Any) -> Any:
        def attribute(unit: Any) -> None:
            recorder = active_recorder()
            previous, recorder.unit = recorder.unit, unit.name
            try:
                original(unit)
            finally:
                recorder.unit = previous

        return attribute

    with (
        replaced(f"{module}._unshard_parameter_groups", make),
        replaced(f"{module}._reduce_gradient_groups", make),
    ):
        yield
