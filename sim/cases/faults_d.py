"""The faults of group D, and the bodies and scenarios that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sim.cases import bodies_streams as streams
from sim.cases import bodies_units as units
from sim.cases.base import Run
from sim.cases.numbers import compare_gradients
from sim.cases.worlds import Defect, Rank, at_node, replaced, run_ranks
from sim.checks import Violation


def on_ranks(
    body: Callable[[Rank], Any], *, num_ranks: int = 2, defect: Defect | None = None
) -> Run:
    """Returns a run of `body` on every rank, with a defect in place or without one."""

    def run() -> list[Violation]:
        if defect is None:
            return run_ranks(num_ranks, body).violations()
        with defect():
            return run_ranks(num_ranks, body).violations()

    return run


# -- D1 ---------------------------------------------------------------------------------------


def first_window(rank: Rank) -> None:
    """One window of a hybrid mesh, seen from construction on.

    The accumulators come from the compute stream's pool and are replaced on the reduce-scatter
    stream, which still reads them when their last reference goes.
    """
    rank.observe()
    torch.manual_seed(1)
    chunk: Any = units.Chunk()
    units.shard_chunk(chunk, units.dense_mesh(2))
    kernel = units.Kernel(units.wrap(chunk))
    rank.describe(kernel.model)
    kernel.step(0)


def accumulators_as_released() -> AbstractContextManager[None]:
    """Nobody tells the allocator of the stream that replaces the accumulators."""
    return replaced("real.mcore.schedule.internals.keep_accumulators", lambda _: lambda root: None)


# -- D3 ---------------------------------------------------------------------------------------


def driven_stage(*, waits: bool) -> Callable[[Rank], None]:
    """A pipeline stage whose layers are called by hand, under MFSDP's own hooks.

    The root is never called, so neither its wait for the optimizer nor its final callback happens.
    """

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunk: Any = units.Chunk(has_embedding=False, has_output=False)
        units.shard_chunk(chunk, units.dense_mesh())
        chunk._lazy_init_context()
        rank.observe(chunk)
        context = chunk._context
        units.begin(0)
        context.allgather_stream.wait_stream(torch.cuda.current_stream())
        value = units.given_to(rank.number, 0).requires_grad_()
        for layer in chunk.decoder.layers.values():
            value = layer(value)
        value.sum().backward()
        if waits:
            torch.cuda.current_stream().wait_stream(context.reduce_scatter_stream)
        units.read_gradients()
        units.end(0)

    return body


# -- D7, D8, D9 -------------------------------------------------------------------------------


def helpers_by_hand(*, skips_event: bool) -> Callable[[Rank], None]:
    """A test that gathers a unit, reads its weight and releases it, twice over."""

    def body(rank: Rank) -> None:
        kernel = units.start(rank)
        unit = kernel.model.scheduler.units["decoder.layers.0"]
        value = units.given_to(rank.number, 0)
        for _ in range(2):
            if skips_event:
                unit.unit.unshard()
            else:
                kernel.model.unshard(unit.name)
            weight = unit.unit.module.get_parameter("attn.weight")
            torch.nn.functional.linear(value, weight.detach())
            if skips_event:
                unit.unit.reshard()
            else:
                kernel.model.reshard(unit.name)

    return body


def backward_after_a_step(rank: Rank) -> None:
    """The forward of one submodule comes before an optimizer step, its backward after it."""
    kernel = units.start(rank)
    model = kernel.model
    layer: Any = model.module.get_submodule("decoder.layers.0")
    given = units.given_to(rank.number, 0).requires_grad_()
    units.begin(0)
    output = layer.attn(given)
    model.post_forward_release_module(layer)
    kernel.window(1)
    model.finish_grad_sync()
    units.optimizer_step(kernel.optimizer)
    units.end(0)
    units.begin(1)
    with at_node("attn", "backward", layer="decoder.layers.0"):
        output.backward(torch.ones_like(output))
    model.post_backward_release_module(layer)
    kernel.window(1)
    model.finish_grad_sync()
    units.end(1)


def no_fork_in_backward() -> AbstractContextManager[None]:
    """A gather that a backward asks for does not wait for the optimizer."""

    def make(original: Any) -> Any:
        def fork(context: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                original(context)

        return fork

    return replaced("real.hooks.ordering.fork_all_gather", make)


def later_stage(rank: Rank) -> None:
    """A stage whose first unit is a layer: its root owns the output projection alone."""
    torch.manual_seed(1)
    kernel = units.start(rank, units.Chunk(has_embedding=False))
    for step in range(2):
        kernel.step(step)


def only_the_root_forks() -> AbstractContextManager[None]:
    """No unit but the root makes the all-gather stream wait for the optimizer."""

    def make(original: Any) -> Any:
        def gather(scheduler: Any, unit: Any) -> None:
            scheduler._needs_fork = False
            original(scheduler, unit)

        return gather

    return replaced("real.hooks.scheduler.UnitScheduler._gather", make)


# -- D10, D13, D15 ----------------------------------------------------------------------------


def dispatch_does_not_wait() -> AbstractContextManager[None]:
    """The backward of a dispatch starts without the event of the node before it."""

    class Deaf:
        def __init__(self, event: Any) -> None:
            self._event = event

        def wait(self, stream: Any) -> None:
            pass

        def record(self, stream: Any) -> None:
            self._event.record(stream)

    def make(original: Any) -> Any:
        @contextmanager
        def acquire(node: Any, name: str | None = None) -> Iterator[None]:
            event = node.event
            if name == "moe_dispatch backward":
                node.event = Deaf(event)
            try:
                with original(node, name):
                    yield
            finally:
                node.event = event

        return acquire

    return replaced(
        "megatron.core.pipeline_parallel.utils.ScheduleNode.stream_acquire_context", make
    )


def accumulated(*, waits: bool) -> list[Violation]:
    """Judges the trace and the sum of three microbatches."""
    outcome = run_ranks(2, lambda rank: streams.reused_while_reduced(rank, waits=waits))
    found = outcome.violations()
    for rank, shard in enumerate(outcome.results):
        expected = torch.full_like(shard, sum(2.0 * (m + 1) + 1 for m in range(3)))
        name = f"{streams.LAYER}.mlp.weight"
        found += compare_gradients(rank, {name: shard}, {name: expected}, [streams.LAYER])
    return found


@contextmanager
def outer_reduction_aside(*, is_tracked: bool) -> Iterator[None]:
    """The last microbatch's reduction over the outer axis runs on a stream of its own."""
    outer: dict[int, Any] = {}

    def make_reduce(original: Any) -> Any:
        def reduce(group: Any, partial: Any, is_last_microbatch: bool = True) -> None:
            original(group, partial, False)
            if not is_last_microbatch:
                return
            rank = torch.distributed.get_rank()
            if rank not in outer:
                outer[rank] = torch.cuda.Stream()
            outer[rank].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(outer[rank]):
                group.main_grad.local_buffer.record_stream(outer[rank])
                group.main_grad = group.main_grad.redistribute(group.main_weight.placements)
                group._install_sharded_grads()

        return reduce

    def make_join(original: Any) -> Any:
        def join(context: Any) -> None:
            original(context)
            stream = outer.get(torch.distributed.get_rank())
            if stream is not None and is_tracked:
                torch.cuda.current_stream().wait_stream(stream)

        return join

    groups = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group"
    with (
        replaced(f"{groups}.FsdpParameterGroup.reduce_partial_gradients", make_reduce),
        replaced("real.hooks.ordering.join_reduce_scatter", make_join),
    ):
        yield


def a_step_with_an_outer_axis(rank: Rank) -> None:
    """Runs one step on a hybrid mesh."""
    units.start(rank, num_outer=2).step(0)
