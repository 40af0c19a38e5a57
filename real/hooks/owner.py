"""Which unit owns the parameters that a submodule reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn


class OwnedModule(NamedTuple):
    """A submodule that directly owns a parameter, and its nearest enclosing unit."""

    name: str
    module: nn.Module
    unit: str


def owned_modules(root: nn.Module, is_unit: Callable[[nn.Module], bool]) -> Iterator[OwnedModule]:
    """Yields every submodule that directly owns a parameter, in registration order.

    A submodule without a parameter of its own is left out on purpose: a hook on it can run after
    its unit's gradients are complete, gather the unit again, and nothing would release it.

    Args:
        root: The outermost module; must be a unit.
        is_unit: Tells FSDP units from other modules.

    Raises:
        ValueError: `root` is no unit, so some parameters would have no owner.
    """
    if not is_unit(root):
        raise ValueError(f"Expected the root {type(root).__name__} to be an FSDP unit, got none.")
    yield from _visit(root, "", "", is_unit, set())


def _visit(
    module: nn.Module,
    name: str,
    owner: str,
    is_unit: Callable[[nn.Module], bool],
    seen: set[nn.Module],
) -> Iterator[OwnedModule]:
    if module in seen:
        return
    seen.add(module)
    if is_unit(module):
        owner = name  # before its own parameters are looked at: a unit owns what it holds itself
    if any(True for _ in module.parameters(recurse=False)):
        yield OwnedModule(name, module, owner)
    for child_name, child in module.named_children():
        yield from _visit(
            child, f"{name}.{child_name}" if name else child_name, owner, is_unit, seen
        )
