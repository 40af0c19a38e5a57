"""Puts something else in the place of a name, for the length of a block."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `make(what stands there)` in the place of an attribute for the length of the block.

    Args:
        owner: A module, a class or an object.
        name: The attribute; what a class or an object only inherits is inherited again afterwards.
        make: Given the original: of a class the plain attribute, not what its `__get__` returns.
    """
    is_own = name in vars(owner)
    original = vars(owner)[name] if is_own else getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def owner_of(target: str) -> tuple[Any, str]:
    """Returns what a dotted name is an attribute of, and the attribute's name."""
    owner, _, name = target.rpartition(".")
    return pkgutil.resolve_name(owner), name
