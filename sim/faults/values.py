"""Every fault that a run can be given.

Two kinds. A fault of the first kind breaks something, and a run or a check has to notice it. The
delays and stalls break nothing: they are orders that the machine may choose, so a correct run must
come out the same under each of them.

`n` counts from 0 among what matches the other fields. A unit, module or stream that is not given
matches all. No module here needs torch, so a bad fault is answered at once; only the
names of hook points come from the scheduler itself.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Final, Protocol

_SUBJECTS: Final = {"module", "parameter", "cause"}
"""What a hook point is told last: who calls it."""


@functools.cache
def hook_points() -> tuple[str, ...]:
    """Returns the scheduler's hook points: what modules, parameters and the schedule call.

    Loads torch with the scheduler, so it is asked only where a fault names a point.
    """
    from real.hooks.scheduler import UnitScheduler

    return tuple(
        name
        for name, method in inspect.getmembers(UnitScheduler, inspect.isfunction)
        if not name.startswith("_") and [*inspect.signature(method).parameters][-1] in _SUBJECTS
    )


ROLES: Final = ("compute", "communication", "all_gather", "reduce_scatter")
"""Streams by what they are for; any other is named by its number."""


class Fault(Protocol):
    """A disturbance of one rank."""

    @property
    def rank(self) -> int:
        """The global rank that is disturbed."""
        ...


@dataclass(frozen=True, kw_only=True)
class SkipCollective:
    """One rank leaves one collective out and goes on as if it had happened.

    Attributes:
        index: Which of that rank's collectives, counted from 0 over all groups of two ranks or
            more.
    """

    rank: int
    index: int


@dataclass(frozen=True, kw_only=True)
class SwapCollectives:
    """One rank issues two consecutive collectives in the other order."""

    rank: int
    index: int


@dataclass(frozen=True, kw_only=True)
class LoseCompletion:
    """One rank is never told that one of its collectives is done."""

    rank: int
    index: int


@dataclass(frozen=True, kw_only=True)
class DropWait:
    """Stream and event waits of one rank are left out.

    Attributes:
        n: Which of the waits that match; None leaves every one of them out.
        unit: The unit whose hook, gather, release or reduction makes the wait.
        point: The hook point that makes the wait.
        stream: The stream that waits, a role or a number.
        on: The stream that is waited for, a role or a number.
    """

    rank: int
    n: int | None = None
    unit: str | None = None
    point: str | None = None
    stream: str | None = None
    on: str | None = None


@dataclass(frozen=True, kw_only=True)
class SwapHooks:
    """One hook call is made after the hook call that follows it."""

    rank: int
    n: int = 0
    unit: str | None = None
    point: str | None = None
    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoseCallback:
    """One hook call is not made."""

    rank: int
    n: int = 0
    unit: str | None = None
    point: str = "post_gradient"
    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class FreeEarly:
    """A unit is released after a hook that gathered it, so before its module reads it."""

    rank: int
    n: int = 0
    unit: str | None = None
    point: str = "pre_forward"


@dataclass(frozen=True, kw_only=True)
class DoubleInstall:
    """The hooks are installed twice, past the guard that keeps them from it."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class DelayRank:
    """One rank gets no turn for some switches, as long as another rank can run.

    Attributes:
        at: Number of the switch from which on it waits.
        turns: For how many switches.
    """

    rank: int
    at: int = 0
    turns: int = 50


@dataclass(frozen=True, kw_only=True)
class StallStream:
    """What one stream runs ends as late as the recorded waits allow.

    Attributes:
        stream: A role or a number.
    """

    rank: int
    stream: str


@dataclass(frozen=True, kw_only=True)
class StallCollective:
    """Collectives of one rank end as late as the recorded waits allow.

    Attributes:
        unit: The unit on whose behalf they are called.
        kind: What they do, as all_gather.
        n: Which of those that match; None stalls every one of them.
    """

    rank: int
    n: int | None = None
    unit: str | None = None
    kind: str | None = None


def is_stall(fault: Fault) -> bool:
    """Whether a fault is an order of the device, so that nothing changes for the host."""
    return isinstance(fault, (StallStream, StallCollective))


def needs_kernels(fault: Fault) -> bool:
    """Whether a fault shows only where kernels are recorded."""
    return is_stall(fault) or isinstance(fault, (DropWait, FreeEarly))
