"""What every hook on a model shares: it never keeps the scheduler alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch

from real.hooks.scheduler import UnitScheduler


class WeakHook:
    """A hook that knows its scheduler weakly: the model never keeps the scheduler alive.

    A deep copy of a module copies its hook dictionaries; the copied hook does nothing, because the
    copy has units of its own or none.
    """

    def __init__(self, scheduler: UnitScheduler, unit: str, subject: str) -> None:
        self.scheduler: Callable[[], UnitScheduler | None] = weakref.ref(scheduler)
        self.unit = unit
        self.subject = subject

    def __deepcopy__(self, memo: dict[int, object]) -> WeakHook:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, scheduler=_no_scheduler)
        return copied


def _no_scheduler() -> None:
    return None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested lists, tuples and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
