"""Inside backward the current stream is that of the node's forward, as on a GPU."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

from typing import Any

import pytest
import torch

from sim.cuda import FakeDevice, Stream

pytestmark = pytest.mark.usefixtures("device")


class _Probe(torch.autograd.Function):
    """Passes its input on, and notes which stream is current in its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        ctx.seen = seen
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(torch.cuda.current_stream())
        return gradients[0], None


def _streams(num_streams: int) -> list[Any]:
    return [torch.cuda.Stream() for _ in range(num_streams)]


def test_backward_node_runs_on_the_stream_of_its_forward() -> None:
    first, second = _streams(2)
    seen: list[Any] = []
    value = torch.ones(1, requires_grad=True)
    with torch.cuda.stream(first):
        value = _Probe.apply(value, seen)
    with torch.cuda.stream(second):
        value = _Probe.apply(value, seen)
    value.backward()
    assert seen == [second, first]


def test_callers_stream_is_current_again_after_backward() -> None:
    [side] = _streams(1)
    value = torch.ones(1, requires_grad=True)
    with torch.cuda.stream(side):
        output = _Probe.apply(value, [])
    output.backward()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_tensor_hook_runs_on_the_stream_of_the_node_that_calls_it() -> None:
    [side] = _streams(1)
    seen: list[Any] = []
    value = torch.ones(1, requires_grad=True)
    with torch.cuda.stream(side):
        doubled = value * 2
        doubled.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
    (doubled + 1).backward()
    assert seen == [side]


def test_stream_change_inside_a_node_ends_with_the_node() -> None:
    """Autograd sets the stream anew for each node, so a change left behind does not leak."""
    first, second = _streams(2)
    seen: list[Any] = []
    value = torch.ones(1, requires_grad=True)
    with torch.cuda.stream(first):
        inner = _Probe.apply(value, seen)
        outer = inner * 1
        outer.register_hook(lambda gradient: torch.cuda.set_stream(second))
    outer.backward()
    assert seen == [first]


def test_stream_block_inside_a_node_gives_back_the_nodes_stream() -> None:
    first, second = _streams(2)
    seen: list[Any] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            seen.append(torch.cuda.current_stream())
        seen.append(torch.cuda.current_stream())

    value = torch.ones(1, requires_grad=True)
    with torch.cuda.stream(first):
        output = value * 1
        output.register_hook(hook)
    output.backward()
    assert seen == [first, second, first]


# -- accumulators -----------------------------------------------------------------------------


def _note_accumulation(weight: torch.Tensor, seen: list[Any]) -> None:
    weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(torch.cuda.current_stream())
    )


def test_accumulator_runs_on_the_stream_of_the_parameters_first_use() -> None:
    first, second = _streams(2)
    weight = torch.ones(1, requires_grad=True)
    seen: list[Any] = []
    _note_accumulation(weight, seen)
    with torch.cuda.stream(first):
        output = weight * 2
    with torch.cuda.stream(second):
        output = output * weight
    output.backward()
    assert seen == [first]


def test_accumulators_of_one_backward_keep_their_own_streams() -> None:
    streams = _streams(3)
    weights = [torch.ones(1, requires_grad=True) for _ in streams]
    seen: list[list[Any]] = [[] for _ in streams]
    output = torch.ones(1)
    for stream, weight, notes in zip(streams, weights, seen, strict=True):
        _note_accumulation(weight, notes)
        with torch.cuda.stream(stream):
            output = output * weight
    output.backward()
    assert seen == [[stream] for stream in streams]


def test_accumulator_is_not_reached_by_another_ones_stream_block() -> None:
    """All accumulators have one number; a block inside one of them leaves nothing for the next."""
    first, second, third = _streams(3)
    seen: list[Any] = []
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]

    def hook(parameter: torch.Tensor) -> None:
        seen.append(torch.cuda.current_stream())
        with torch.cuda.stream(third):
            pass

    output = torch.ones(1)
    for stream, weight in zip((first, second), weights, strict=True):
        weight.register_post_accumulate_grad_hook(hook)
        with torch.cuda.stream(stream):
            output = output * weight
    output.backward()
    assert seen == [second, first]


def test_backward_inside_backward_finds_its_own_accumulators() -> None:
    """Recomputation runs a backward of its own inside a node of another one."""
    outer_stream, inner_stream = _streams(2)
    seen: list[Any] = []
    weight = torch.ones(1, requires_grad=True)
    _note_accumulation(weight, seen)

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad(), torch.cuda.stream(inner_stream):
                again = (weight * 3).sum()
            torch.autograd.backward(again)
            return gradients[0]

    value = torch.ones(1, requires_grad=True)
    _note_accumulation(value, seen)
    with torch.cuda.stream(outer_stream):
        output = Recomputed.apply(value)
    output.backward()
    assert seen == [inner_stream, outer_stream]


def test_backward_of_a_leaf_accumulates_on_the_callers_stream() -> None:
    [side] = _streams(1)
    seen: list[Any] = []
    weight = torch.ones(1, requires_grad=True)
    _note_accumulation(weight, seen)
    with torch.cuda.stream(side):
        weight.backward()
    assert seen == [side]


def test_failed_backward_leaves_no_graph_behind(device: FakeDevice) -> None:
    weight = torch.ones(1, requires_grad=True)

    def fail(parameter: torch.Tensor) -> None:
        raise ValueError("on purpose")

    weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        (weight * 2).backward()
    assert device.graph_tasks == []


def test_engine_call_by_keyword_is_a_backward_too() -> None:
    """Megatron calls the engine itself, with `tensors=`."""
    weight = torch.ones(1, requires_grad=True)
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(weight * 2,),
        grad_tensors=(torch.ones(1),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    assert weight.grad is not None
    assert weight.grad.item() == 2


def test_stream_type_is_the_stand_in() -> None:
    assert isinstance(torch.cuda.current_stream(), Stream)
