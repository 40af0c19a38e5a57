"""Module and class globals that belong to one rank, exchanged at every switch between ranks.

Frameworks keep process-wide state in globals because one process is one rank. Here many ranks share
a process and one runs at a time, so it is enough to put each rank's values in place before it runs.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d

_C10D_REGISTRIES: Final = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
_MISSING: Final = object()
_get_rng_state = torch.get_rng_state
_set_rng_state = torch.set_rng_state


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One global that each rank has for itself.

    Attributes:
        owner: The module or class.
        name: The attribute.
        initial: Makes a rank's first value from the one found when the world starts; None copies
            containers and shares everything else.
    """

    owner: Any
    name: str
    initial: Callable[[Any], Any] | None = None


def torch_state() -> list[RankState]:
    """Returns process-wide state of torch and Python: process groups and warning filters.

    `warnings.catch_warnings` puts back the filters that it found, so two ranks inside it at once
    would leave each other's behind.
    """
    registries = [name for name in _C10D_REGISTRIES if hasattr(c10d, name)]
    return [
        RankState(owner=c10d, name="_world", initial=lambda _: c10d._World()),
        RankState(owner=c10d, name="_group_count", initial=lambda _: 0),
        *(RankState(owner=c10d, name=name, initial=lambda _: {}) for name in registries),
        RankState(owner=warnings, name="filters"),
        RankState(owner=warnings, name="showwarning"),
        RankState(owner=warnings, name="_showwarnmsg_impl"),
    ]


class StateSet:
    """The values of all such globals for one rank, with the random states of torch and Python."""

    def __init__(self, names: Sequence[RankState]) -> None:
        self._slots = [(s.owner, s.name) for s in names]
        self._values = [self._first_value(s) for s in names]
        self._torch_rng = _get_rng_state()
        self._python_rng = random.getstate()

    @staticmethod
    def _first_value(state: RankState) -> Any:
        value = vars(state.owner).get(state.name, _MISSING)
        if state.initial is not None:
            return state.initial(value)
        return copy.copy(value) if isinstance(value, (dict, list, set)) else value

    def install(self) -> None:
        """Puts this rank's values in place, and keeps none: `save` takes what is there then.

        A value kept here would outlive the rank's own use of it until the rank's next turn ends,
        and the release of its memory would depend on the turns of all ranks.
        """
        for (owner, name), value in zip(self._slots, self._values, strict=True):
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        self._values = []
        _set_rng_state(self._torch_rng)
        random.setstate(self._python_rng)

    def save(self) -> None:
        """Takes the values found in place as this rank's own."""
        self._values = [vars(owner).get(name, _MISSING) for owner, name in self._slots]
        self._torch_rng = _get_rng_state()
        self._python_rng = random.getstate()

    def clear(self) -> None:
        """Lets go of all values."""
        self._slots, self._values = [], []


def snapshot(names: Iterable[RankState]) -> StateSet:
    """Returns the present values themselves, to put back when the world ends."""
    return StateSet([RankState(owner=s.owner, name=s.name, initial=_same) for s in names])


def _same(value: Any) -> Any:
    return value
