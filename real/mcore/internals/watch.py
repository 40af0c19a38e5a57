"""Tells when MFSDP works on a unit, and when the plain schedule runs a layer or a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import FsdpModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from real.watch import Point, UnitView, reduce_point, reshard_point, unshard_point

Watcher = Callable[[str, str], None]
"""Called with the name of what begins or ends, and its direction."""

UnitWatcher = Callable[[str, str, str], None]
"""Called with the name of what begins or ends, its kind, and the name of the unit."""


def unit_points(num_zero_filled: Callable[[Any], int]) -> list[Point]:
    """Returns MFSDP's own methods that work on a unit, to be recorded.

    Args:
        num_zero_filled: Returns how many gradients of a module's next reduction were filled with
            zeros.
    """
    view = UnitView(
        name=_name,
        is_gathered=lambda module: module._unshard_event is not None,
        is_last_microbatch=lambda module: bool(module.context.is_last_microbatch),
        gradients=_gradients,
        version=_version,
        num_zero_filled=num_zero_filled,
    )
    return [
        unshard_point(FsdpModule, "_unshard_parameter_groups", view),
        reshard_point(FsdpModule, "_reshard_parameter_groups", view),
        reduce_point(FsdpModule, "_reduce_gradient_groups", view),
    ]


def _name(module: Any) -> str:
    return str(module.name or "")


def _gradients(module: Any) -> Mapping[str, bool]:
    prefix = f"{_name(module)}." if _name(module) else ""
    return {
        prefix + name: parameter.grad is not None
        for group in module._parameter_groups
        if group.requires_grad
        for name, parameter in zip(group.parameter_names, group.unsharded_parameters, strict=True)
    }


def _version(module: Any) -> int:
    return sum(
        tensor._version
        for group in module._parameter_groups
        for tensor in (group._unsharded_model_weight.local_buffer, *group.unsharded_parameters)
    )


@contextmanager
def watched_units(before: UnitWatcher, after: UnitWatcher) -> Iterator[None]:
    """Calls `before` and `after` around every unshard, reshard and reduction of the process.

    Names are "unshard", "reshard" and "reduce"; kinds are "gathered" or "noop" for an unshard,
    "last" or "" for a reduction, "" for a reshard.
    """

    def kind_of_unshard(module: Any) -> str:
        return "gathered" if module._unshard_event is None else "noop"

    def kind_of_reduce(module: Any) -> str:
        return "last" if module.context.is_last_microbatch else ""

    methods: dict[str, tuple[str, Callable[[Any], str]]] = {
        "_unshard_parameter_groups": ("unshard", kind_of_unshard),
        "_reshard_parameter_groups": ("reshard", lambda _: ""),
        "_reduce_gradient_groups": ("reduce", kind_of_reduce),
    }
    with ExitStack() as stack:
        for method, (name, kind_of) in methods.items():
            original = getattr(FsdpModule, method)
            setattr(FsdpModule, method, _around(original, name, kind_of, before, after))
            stack.callback(setattr, FsdpModule, method, original)
        yield


def _around(
    original: Callable[..., Any],
    name: str,
    kind_of: Callable[[Any], str],
    before: UnitWatcher,
    after: UnitWatcher,
) -> Callable[..., Any]:
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        kind, unit = kind_of(module), str(module.name or "")
        before(name, kind, unit)
        result = original(module, *args, **kwargs)
        after(name, kind, unit)
        return result

    return run


@contextmanager
def watched_layers(root: nn.Module, before: Watcher, after: Watcher) -> Iterator[None]:
    """Calls `before` and `after` around each call of a transformer layer under `root`.

    The name is "layer" and the direction "forward". The combined schedule calls no layer.
    """
    with ExitStack() as stack:
        for module in root.modules():
            if isinstance(module, TransformerLayer):
                begin = module.register_forward_pre_hook(
                    lambda *_: before("layer", "forward"), prepend=True
                )
                end = module.register_forward_hook(lambda *_: after("layer", "forward"))
                stack.callback(begin.remove)
                stack.callback(end.remove)
        yield


@contextmanager
def watched_backwards(before: Watcher, after: Watcher) -> Iterator[None]:
    """Calls `before` and `after` around the backward of each microbatch of the plain schedule.

    The name is "model" and the direction "backward". A backward inside another one, as recompute
    runs it, does not count; the combined schedule runs its nodes another way.
    """
    backward = torch.autograd.backward

    def run(*args: Any, **kwargs: Any) -> None:
        if torch._C._current_autograd_node() is not None:
            backward(*args, **kwargs)
            return
        before("model", "backward")
        backward(*args, **kwargs)
        after("model", "backward")

    torch.autograd.backward = run
    try:
        yield
    finally:
        torch.autograd.backward = backward


@contextmanager
def watched_finalize(config: Any, before: Watcher, after: Watcher) -> Iterator[None]:
    """Calls `before` and `after` around the end of a step, where gradients become ready to read.

    The name is "finalize" and the direction "step".

    Args:
        config: Megatron's config of the model; the schedule finds the function there.
        before: Called first.
        after: Called last.
    """
    finalize = config.finalize_model_grads_func

    def run(*args: Any, **kwargs: Any) -> None:
        before("finalize", "step")
        finalize(*args, **kwargs)
        after("finalize", "step")

    config.finalize_model_grads_func = run
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize
