"""Small bodies of streams, events, buffers and collectives, each with one fault or without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from real.trace import OpKind, active_recorder
from sim.cases.worlds import Rank, at_node

LAYER = "decoder.layers.0"
EXPERTS = "decoder.layers.0.mlp.experts"


@contextmanager
def at_work(unit: str) -> Iterator[None]:
    """Attributes the collectives inside to a unit."""
    recorder = active_recorder()
    previous, recorder.unit = recorder.unit, unit
    try:
        yield
    finally:
        recorder.unit = previous


def drained_states(rank: Rank, *, waits: bool) -> None:
    """Keeps reduce inputs in a list that the layer's group alone drains.

    The layer's reduction is expected after the experts'; here it comes first, so the experts' input
    stays in the list until the next microbatch drops it.

    Args:
        rank: The rank.
        waits: Whether every reduction drains the list, and waits for all that it drops.
    """
    rank.observe()
    compute, reduce_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    states: dict[str, tuple[torch.Tensor, torch.cuda.Event]] = {}
    shard = torch.zeros(4)

    def drain(units: tuple[str, ...]) -> None:
        for unit in units:
            if unit in states:
                compute.wait_event(states[unit][1])
        states.clear()

    for microbatch in range(2):
        for unit in (LAYER, EXPERTS):  # the order that nobody enforces
            with at_node("mlp", "backward", layer="decoder.layers.0", microbatch=microbatch):
                if waits:
                    drain((LAYER, EXPERTS))
                elif unit == LAYER:
                    drain((LAYER,))
                gradient = torch.ones(4 * dist.get_world_size())
                rank.name(gradient, unit, "reduce input")
                reduce_stream.wait_stream(compute)
                with torch.cuda.stream(reduce_stream), at_work(unit):
                    dist.reduce_scatter_tensor(shard, gradient)
                    states[unit] = (gradient, reduce_stream.record_event())
                del gradient
    compute.wait_stream(reduce_stream)


def reused_while_reduced(rank: Rank, *, waits: bool) -> torch.Tensor:
    """Sends a gradient at the first microbatch while later ones write into the same buffer.

    Args:
        rank: The rank.
        waits: Whether each microbatch is reduced into the shard before its buffer is used again.

    Returns:
        The sharded gradient after three microbatches.
    """
    rank.observe()
    compute, reduce_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    size = dist.get_world_size()
    shard = torch.zeros(4)
    for microbatch in range(3):
        with at_node("mlp", "backward", layer="decoder.layers.0", microbatch=microbatch):
            gradient = torch.full((4 * size,), float(microbatch + 1 + rank.number))
            rank.name(gradient, LAYER, "gradient")
            if waits or microbatch == 0:
                part = torch.empty(4)
                reduce_stream.wait_stream(compute)
                with torch.cuda.stream(reduce_stream), at_work(LAYER):
                    dist.reduce_scatter_tensor(part, gradient)
                if waits:
                    compute.wait_stream(reduce_stream)
                    shard += part
                else:
                    with torch.cuda.stream(reduce_stream):
                        shard.copy_(part)
                        del part
            del gradient
    compute.wait_stream(reduce_stream)
    return shard


def dispatched_tokens(rank: Rank, *, waits: bool) -> None:
    """Dispatches two microbatches through one buffer that the dispatcher keeps.

    The delayed weight gradient of the first reads its tokens on the compute stream, while the
    dispatch of the second writes on the communication stream.

    Args:
        rank: The rank.
        waits: Whether a dispatch waits for the last reader of the buffer.
    """
    rank.observe()
    compute, communication = torch.cuda.current_stream(), torch.cuda.Stream()
    size = dist.get_world_size()
    buffer, weight = torch.zeros(size, 4), torch.ones(4, 4)
    layer = "decoder.layers.0"
    communication.wait_stream(compute)

    def dispatch(microbatch: int) -> torch.cuda.Event:
        with torch.cuda.stream(communication):
            with at_node("moe_dispatch", "forward", layer=layer, microbatch=microbatch):
                if waits:
                    communication.wait_stream(compute)
                tokens = torch.full((size, 4), float(microbatch))
                dist.all_to_all_single(buffer, tokens)
                arrived: torch.cuda.Event = communication.record_event()
                return arrived

    for microbatch in range(2):
        arrived = dispatch(microbatch)
        with at_node("mlp", "forward", layer=layer, microbatch=microbatch):
            compute.wait_event(arrived)
            output = buffer @ weight
        with at_node("mlp", "wgrad", layer=layer, microbatch=microbatch):
            weight_gradient = buffer.t() @ output
        del output, weight_gradient


def full_weight_outside_the_pool(rank: Rank, *, resizes: bool) -> None:
    """Takes full weights from an allocator that has a fallback for units too big for its pool.

    Args:
        rank: The rank.
        resizes: Whether the fallback gives memory back as the pool does: on the stream that
            allocated it, after the readers. Without it the last reference is dropped where it is.
    """
    rank.observe()
    compute, gather_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    size = dist.get_world_size()
    shard, value = torch.ones(8), torch.ones(2, 8 * size)

    def gather(unit: str) -> torch.Tensor:
        with torch.cuda.stream(gather_stream), at_work(unit):
            full = torch.empty(8 * size)
            rank.name(full, unit)
            dist.all_gather_into_tensor(full, shard)
            compute.wait_event(gather_stream.record_event())
        return full

    gather_stream.wait_stream(compute)
    for layer in ("decoder.layers.0", "decoder.layers.1"):
        with at_node("mlp", layer=layer):
            full = gather(layer)
            output = value @ full
            if resizes:
                gather_stream.wait_stream(compute)
                with torch.cuda.stream(gather_stream):
                    full.untyped_storage().resize_(0)
            del full, output


def gather_after_reduction(
    rank: Rank, *, shares_stream: bool = False, shares_group: bool = False
) -> None:
    """Gathers a layer ahead while the reduction of the layer before it in backward is on its way.

    Args:
        rank: The rank.
        shares_stream: Whether both run on one stream.
        shares_group: Whether both use one communicator.
    """
    rank.observe()
    compute, reduce_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    gather_stream = reduce_stream if shares_stream else torch.cuda.Stream()
    size = dist.get_world_size()
    reduce_group: Any = dist.new_group(list(range(size)))
    gather_group: Any = reduce_group if shares_group else dist.new_group(list(range(size)))
    shard, gradient = torch.ones(8), torch.ones(8 * size)
    with at_node("attn", "backward", layer="decoder.layers.1"):
        reduced = torch.empty(8)
        reduce_stream.wait_stream(compute)
        with torch.cuda.stream(reduce_stream), at_work("decoder.layers.1"):
            dist.reduce_scatter_tensor(reduced, gradient, group=reduce_group)
        if gather_stream is not reduce_stream:
            gather_stream.wait_stream(compute)
        with torch.cuda.stream(gather_stream), at_work("decoder.layers.0"):
            full = torch.empty(8 * size)
            dist.all_gather_into_tensor(full, shard, group=gather_group)
            gathered = gather_stream.record_event()
    with at_node("mlp", "backward", layer="decoder.layers.0"):
        compute.wait_event(gathered)
        full.square()
    compute.wait_stream(reduce_stream)
    compute.wait_stream(gather_stream)
    gather_stream.wait_stream(compute)
    del full


def bound_gradient(rank: Rank, *, keeps: bool) -> None:
    """Captures a backward whose gradient the optimizer reads after each replay.

    Args:
        rank: The rank.
        keeps: Whether the gradient is set to zero where it is; else it is dropped and made anew.
    """
    rank.observe()
    weight = torch.nn.Parameter(torch.ones(4, 4))
    value = torch.ones(2, 4)

    def backward() -> None:
        (value @ weight).sum().backward()
        assert weight.grad is not None
        rank.name(weight.grad, LAYER, "gradient")

    backward()
    with captured(), at_node("mlp", "backward", layer=LAYER):
        if keeps:
            assert weight.grad is not None
            weight.grad.zero_()
        else:
            weight.grad = None
        backward()


@contextmanager
def captured() -> Iterator[None]:
    """Records a graph capture on the current stream around the block."""
    recorder = active_recorder()
    stream = torch.cuda.current_stream().stream_id
    recorder.record(OpKind.CAPTURE, event="begin", graph=0, stream=stream)
    yield
    recorder.record(OpKind.CAPTURE, event="end", graph=0, stream=stream)
