"""Tells when MFSDP works on a unit, and when the plain schedule runs a layer or a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import FsdpModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

Watcher = Callable[[str, str], None]
"""Called with the name of what begins or ends, and its direction."""

UnitWatcher = Callable[[str, str, str], None]
"""Called with the name of what begins or ends, its kind, and the name of the unit."""


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
