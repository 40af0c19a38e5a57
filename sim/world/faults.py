"""Disturbances of one rank's collectives, as values that a world is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Fault(Protocol):
    """A disturbance that looks at each collective before it is issued."""

    @property
    def rank(self) -> int:
        """The global rank that is disturbed."""
        ...

    @property
    def index(self) -> int:
        """Which of that rank's collectives, counted from 0 over all groups of two ranks or more."""
        ...


@dataclass(frozen=True, kw_only=True)
class SkipCollective:
    """One rank leaves one collective out and goes on as if it had happened."""

    rank: int
    index: int


@dataclass(frozen=True, kw_only=True)
class SwapCollectives:
    """One rank issues two consecutive collectives in the other order."""

    rank: int
    index: int


class Disturber:
    """Applies the faults of one rank, in front of everything that the world sees."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._fault_by_index = {fault.index: fault for fault in faults if fault.rank == rank}
        self._num_collectives = 0
        self._held_back: Callable[[], None] | None = None

    def holds(self, issue: Callable[[], None]) -> bool:
        """Counts one collective and tells whether a fault keeps it from being issued now.

        Args:
            issue: Issues it later, when it is held back rather than left out.
        """
        fault = self._fault_by_index.get(self._num_collectives)
        self._num_collectives += 1
        if isinstance(fault, SwapCollectives):
            self._held_back = issue
        return fault is not None

    def left_over(self) -> str | None:
        """Says which fault never came up, or None."""
        late = [f for index, f in self._fault_by_index.items() if index >= self._num_collectives]
        if not late:
            return None
        return f"{late[0]} never came up in {self._num_collectives} collectives"

    def release(self) -> None:
        """Issues what an earlier fault holds back; called after each collective."""
        if self._held_back is not None:
            issue, self._held_back = self._held_back, None
            issue()
