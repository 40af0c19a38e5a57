"""Small bodies under real MFSDP units and our hooks: modules that hooks do not reach in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sim.cases import bodies_units as units
from sim.cases.gathers import check_late_readers, check_ranges
from sim.cases.worlds import Rank, at_node, replaced, run_ranks
from sim.checks import Violation

if TYPE_CHECKING:
    from real.hooks import UnitScheduler


def hook(
    root: nn.Module,
    *,
    layers: Sequence[str] = (),
    fires: Mapping[str, int] | None = None,
    unhooked: str | None = None,
    is_counted: Callable[[str], bool] = lambda _: True,
) -> UnitScheduler:
    """Puts our hooks on a sharded model in place of MFSDP's own; the model keeps them.

    Args:
        root: The outermost unit.
        layers: Modules that are called as a whole and release their units themselves.
        fires: Gradients per microbatch of parameters that more than one node uses.
        unhooked: A unit whose modules do not gather it; the caller has to.
        is_counted: Whether a parameter's gradient is waited for.
    """
    from real.hooks import build_plan, build_scheduler, install_hooks
    from real.mcore import internals

    context = internals.initialize_context(root)
    found = internals.collect_units(root)
    plan = build_plan(
        root,
        found,
        layers=layers,
        fires=fires,
        is_delayed=lambda p: bool(getattr(p, "skip_backward_post_hook", False)),
    )
    plan = dataclasses.replace(plan, demand=tuple(d for d in plan.demand if d.unit != unhooked))
    internals.detach_execution_hooks(root)

    def make(_: Any) -> UnitScheduler:
        return build_scheduler(plan, context, found, is_counted=is_counted)

    parameters = {n: p for unit in found.values() for n, p in unit.trainable_parameters.items()}
    return install_hooks(root, plan, make, parameters).scheduler


# -- A2 ---------------------------------------------------------------------------------------


class _Container(nn.Module):
    """Computes with its children's weights and calls no child."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = units.Part()
        self.fc2 = units.Part()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(value, self.fc1.weight)
        return nn.functional.linear(hidden, self.fc2.weight)


def container(*, is_declared: bool) -> list[Violation]:
    """A unit whose module computes with its children's weights."""

    def declare(original: Any) -> Any:
        name = "decoder.layers.0.mlp"
        return lambda *args, **kwargs: dataclasses.replace(
            original(*args, **kwargs), borrowers={name: name}
        )

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunk = units.Chunk(1)
        layer: Any = chunk.get_submodule("decoder.layers.0")
        layer.mlp = _Container()
        units.shard(layer.mlp, units.dense_mesh())
        units.start(rank, chunk).step(0)

    manager = replaced("real.mcore.schedule.find_consumers", declare)
    with manager if is_declared else nullcontext():
        return run_ranks(2, body).violations()


# -- A23 --------------------------------------------------------------------------------------


class _Projection(nn.Linear):
    """Has a method beside `forward` that computes with the weight."""

    def project(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.weight) * 2


def through_forward(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of `method` that runs the hooks of the module's forward."""

    def call(*args: Any) -> Any:
        module.forward = method
        try:
            return module(*args)
        finally:
            del module.forward

    return call


def other_method(*, is_registered: bool) -> list[Violation]:
    """A node that calls a method of its module other than forward()."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunk = units.Chunk(1)
        layer: Any = chunk.get_submodule("decoder.layers.0")
        layer.attn = _Projection(units.WIDTH, units.WIDTH, bias=False, dtype=torch.bfloat16)
        kernel = units.start(rank, chunk)
        node: Any = kernel.nodes[1]
        node.module = (
            through_forward(layer.attn, layer.attn.project) if is_registered else layer.attn.project
        )
        kernel.step(0)

    return run_ranks(2, body).violations()


# -- A15 --------------------------------------------------------------------------------------


class _TwoUnits(nn.Module):
    """A unit whose input needs no gradient, and a weight of the root behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(units.Part(), units.Part())
        self.last = units.Part()


def no_input_gradient(*, is_released_by_module_hook: bool) -> list[Violation]:
    """Backward of a unit that is first in the model and called as a whole."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        model = _TwoUnits()
        mesh = units.dense_mesh()
        units.shard(model.first, mesh)
        units.shard(model, mesh)
        # The unit is hooked as MFSDP hooks it: by its own module, whole.
        scheduler = hook(model, layers=["first"], unhooked="first")
        unit = scheduler.units["first"]
        model.first.register_forward_pre_hook(lambda *_: scheduler.pre_forward("first", "first"))
        model.first.register_full_backward_pre_hook(
            lambda *_: scheduler.pre_backward("first", "first")
        )
        if is_released_by_module_hook:
            model.first.register_full_backward_hook(
                lambda *_: scheduler._close_backward(unit, "module backward hook")
            )
        rank.observe(model)
        units.begin(0)
        with at_node("first"):
            hidden = model.first(units.given_to(rank.number, 0))
        given = hidden.detach().requires_grad_()
        with at_node("last"):
            output = model.last(given)
        with at_node("last", "backward"):
            output.backward(torch.ones_like(output))
        with at_node("first", "backward"):
            hidden.backward(given.grad)
        scheduler.finish_grad_sync()
        units.end(0)

    return run_ranks(2, body).violations(check_late_readers)


# -- A19 --------------------------------------------------------------------------------------


class _Stack(nn.Module):
    """Layers that are called as a whole, each under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(units.Part(), nn.Tanh(), units.Part()) for _ in range(2)
        )
        self.last = units.Part()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False, preserve_rng_state=False)
        result: torch.Tensor = self.last(value)
        return result


def checkpointed(*, has_own_hooks: bool) -> list[Violation]:
    """A step with recomputed layers, which stop as soon as all saved tensors are back."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        model = _Stack()
        mesh = units.dense_mesh()
        for layer in model.layers:
            units.shard(layer, mesh)
        units.shard(model, mesh)
        scheduler = None
        if not has_own_hooks:
            scheduler = hook(model, layers=["layers.0", "layers.1"])
        rank.observe(model)
        units.begin(0)
        value = units.given_to(rank.number, 0).requires_grad_()
        model(value).sum().backward()
        if scheduler is not None:
            scheduler.finish_grad_sync()
        units.end(0)

    return run_ranks(2, body).violations(check_ranges)
