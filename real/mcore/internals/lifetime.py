"""Breaks the reference cycles of a sharded model, so that deleting it frees its storage at once.

MFSDP links units, parameter groups and parameters in both directions and keeps the root in a
context that the root keeps. Such a model goes only when the garbage collector runs, and not even
then when a module keeps a tensor of its last graph: the collector does not see graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.indexed_order import IndexedOrder
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group import (
    FsdpParameterGroup,
    get_containing_parameter_group,
)
from torch import nn

from real.mcore.internals.units import is_fsdp_module

_GROUP_ATTRIBUTE: Final = "_mfsdp_parameter_group"


class GroupLink:
    """Stands on a parameter for the group that owns it, without keeping the group."""

    def __init__(self, group: FsdpParameterGroup) -> None:
        self._group = weakref.ref(group)
        self._hash = id(group)

    @property
    def group(self) -> FsdpParameterGroup:
        """The group."""
        group = self._group()
        if group is None:
            raise RuntimeError("Cannot use a sharded parameter after its model is gone.")
        return group

    def sync_model_weight_from_main_weight(self) -> None:
        """What MFSDP's optimizer hook calls."""
        self.group.sync_model_weight_from_main_weight()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupLink) and self._group() is other._group()

    def __hash__(self) -> int:
        return self._hash


def group_of(parameter: nn.Parameter) -> FsdpParameterGroup | None:
    """Returns the group that owns a parameter, or None."""
    group = get_containing_parameter_group(parameter)
    return group.group if isinstance(group, GroupLink) else group


def loosen(root: nn.Module) -> Callable[[], None]:
    """Makes the back references of a sharded model weak, and returns what makes them strong again.

    The prefetch orders of the context go too: only MFSDP's own execution hooks follow them.
    """
    units: list[Any] = [module for module in root.modules() if is_fsdp_module(module)]
    context: Any = root._context
    order_names = ("forward_order", "backward_order")
    orders = {name: [weakref.ref(m) for m in getattr(context, name)] for name in order_names}
    context.root_module = weakref.proxy(root)
    for name in order_names:
        setattr(context, name, IndexedOrder())
    for module in units:
        for group in module._parameter_groups:
            group.owning_module = weakref.proxy(module)
            _link(group, GroupLink(group))
    root_reference = weakref.ref(root)

    def tighten() -> None:
        root: Any = root_reference()
        if root is None:
            return
        context: Any = root._context
        context.root_module = root
        for name, references in orders.items():
            order: IndexedOrder[Any] = IndexedOrder()
            for reference in references:
                order.append(reference())
            setattr(context, name, order)
        for module in root.modules():
            if is_fsdp_module(module):
                for group in module._parameter_groups:
                    group.owning_module = module
                    _link(group, group)

    return tighten


def _link(group: FsdpParameterGroup, target: object) -> None:
    for parameter in (*group.sharded_parameters, *group.unsharded_parameters):
        setattr(parameter, _GROUP_ATTRIBUTE, target)


def drop_schedule_state(root: nn.Module) -> None:
    """Drops what the combined schedule leaves on a model's modules; the next plan makes it anew."""
    for module in root.modules():
        if "backward_dw_wrapper" in module.__dict__:
            module.__dict__["backward_dw_wrapper"] = None
