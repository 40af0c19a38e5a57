"""Disturbances of one rank's collectives, as values that a world is given."""

from __future__ import annotations

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
        """Which of that rank's collectives, counted from 0 over all groups."""
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
