"""Takes MFSDP's own execution hooks off its units, and puts them back."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from real.mcore.internals.units import collect_units, is_fsdp_module

_MODULE_HOOK_DICTIONARIES: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class _Detached(NamedTuple):
    """Hooks taken off one place: its dictionary, the keys that it had, and the hooks."""

    place: OrderedDict[int, Any]
    keys: list[int]
    hooks: dict[int, Callable[..., Any]]


def detach_execution_hooks(root: nn.Module) -> Callable[[], None]:
    """Takes off the hooks that MFSDP registers on its units, and returns what puts them back.

    They would gather, prefetch, release and reduce by a module's own calls, which the combined
    schedule never makes for a layer and makes at other times for the experts.
    """
    detached: list[_Detached] = []
    modules: Iterable[Any] = root.modules()
    for module in modules:
        if not is_fsdp_module(module):
            continue
        places = [getattr(module, name) for name in _MODULE_HOOK_DICTIONARIES]
        for parameter in (p for g in module._parameter_groups for p in g.unsharded_parameters):
            if parameter._post_accumulate_grad_hooks:
                places.append(parameter._post_accumulate_grad_hooks)
        for place in places:
            keys = list(place)
            own = [key for key in keys if _is_own(place[key])]
            if own:
                detached.append(_Detached(place, keys, {key: place.pop(key) for key in own}))

    def attach() -> None:
        for place, keys, hooks in detached:
            since = [key for key in place if key not in keys]
            place.update(hooks)
            # Others' hooks ran before or after MFSDP's; they do again. Newer ones come last.
            for key in [*(key for key in keys if key in place), *since]:
                place.move_to_end(key)
        detached.clear()

    return attach


def _is_own(hook: object) -> bool:
    return getattr(hook, "__qualname__", "").startswith("FsdpModule.")


def divide_gradients(root: nn.Module, divisors: Mapping[str, int]) -> Callable[[], None]:
    """Divides full gradients of some units as autograd makes them, and returns what undoes it.

    For the plain schedule under MFSDP's own hooks, which leave no place between the last gradient
    of a unit and its reduction.
    """
    handles = []
    for name, unit in collect_units(root).items():
        divisor = divisors.get(name, 1)
        if divisor != 1:
            for parameter in unit.trainable_parameters.values():
                handles.append(
                    parameter.register_hook(functools.partial(torch.Tensor.div, other=divisor))
                )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
