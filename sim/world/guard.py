"""Puts faults of waits, hooks and releases into effect for the length of a block.

The classes that make waits and run hooks get other methods, which look up the rank that calls them.
Nothing is replaced for a fault that is not there, so a run without faults is the run that it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from real.hooks.scheduler import UnitScheduler
from sim.cuda.device import find_device
from sim.cuda.streams import Event, Stream
from sim.faults import (
    DoubleInstall,
    DropWait,
    Fault,
    FreeEarly,
    LoseCallback,
    SwapHooks,
    format_fault,
    hook_points,
)
from sim.swap import swapped

_HookFault = SwapHooks | LoseCallback | FreeEarly
_HOOK_FAULTS: Final = (SwapHooks, LoseCallback, FreeEarly)
_INSTALLER: Final = "real.mcore.schedule"
_MEGATRON_STREAMS: Final = "megatron.core.pipeline_parallel.utils"


class _Counted:
    """One fault with the number of times that something matched it."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault
        self.num_matches = 0
        self.has_come_up = False

    def comes_up(self) -> bool:
        """Counts one match and tells whether it is the one that is meant."""
        number, self.num_matches = self.num_matches, self.num_matches + 1
        is_meant = self.fault.n is None or self.fault.n == number
        self.has_come_up = self.has_come_up or is_meant
        return is_meant


class _RankGuard:
    """What the guard knows of one rank."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        mine = [_Counted(fault) for fault in faults if fault.rank == rank]
        self.waits = [c for c in mine if isinstance(c.fault, DropWait)]
        self.hooks = [c for c in mine if isinstance(c.fault, _HOOK_FAULTS)]
        self.installs = [c for c in mine if isinstance(c.fault, DoubleInstall)]
        self.num_waits = 0
        self.num_hooks = 0
        self.num_installs = 0
        self.open_hooks: list[tuple[str, Sequence[str]]] = []
        self.held_back: list[Callable[[], None]] = []
        self.roles: dict[str, Any] = {}

    def left_over(self) -> str | None:
        """Says which fault never came up, or None."""
        for counted, count, of in (
            *((c, self.num_waits, "waits") for c in self.waits),
            *((c, self.num_hooks, "hook calls") for c in self.hooks),
            *((c, self.num_installs, "installations") for c in self.installs),
        ):
            if not counted.has_come_up:
                found = f" ({counted.num_matches} match)" if counted.num_matches else ""
                return f"fault '{format_fault(counted.fault)}' never came up in {count} {of}{found}"
        return "the last hook was held back and no other followed" if self.held_back else None

    # -- waits ------------------------------------------------------------------------------

    def drops(self, stream: Stream, on: Stream | None) -> bool:
        """Tells whether a fault leaves out the wait of `stream` for `on`."""
        self.num_waits += 1
        point, units = self.open_hooks[-1] if self.open_hooks else (None, ())
        device = find_device()
        at_work = None if device is None else device.recorder.unit
        dropped = False
        for counted in self.waits:
            fault: DropWait = counted.fault
            if (
                (fault.point is None or fault.point == point)
                and (fault.unit is None or fault.unit == at_work or fault.unit in units)
                and (fault.stream is None or self._is(stream, fault.stream))
                and (fault.on is None or self._is(on, fault.on))
            ):
                dropped = counted.comes_up() or dropped
        return dropped

    def _is(self, stream: Stream | None, name: str) -> bool:
        if stream is None:
            return False
        if name.isdecimal():
            return stream.stream_id == int(name)
        return stream is self._stream_of(name)

    def _stream_of(self, role: str) -> Any:
        if role == "compute":
            device = find_device()
            return None if device is None else device.default_stream
        if role == "communication":  # Megatron makes it at the first use of its schedule
            megatron = sys.modules.get(_MEGATRON_STREAMS)
            return None if megatron is None else megatron.get_comm_stream()
        return self.roles.get(role)

    # -- hooks ------------------------------------------------------------------------------

    def call(self, point: str, original: Any, scheduler: Any, names: Any, subject: str) -> None:
        """Makes one hook call, or what a fault makes of it."""
        self.roles = {
            "all_gather": scheduler.context.all_gather_stream,
            "reduce_scatter": scheduler.context.reduce_scatter_stream,
        }
        self.num_hooks += 1
        units = [names] if isinstance(names, str) else list(names)
        is_lost = is_held = False
        freed: list[str] = []
        for counted in self.hooks:
            fault = counted.fault
            if not _matches(fault, point, units, subject) or not counted.comes_up():
                continue
            is_lost = is_lost or isinstance(fault, LoseCallback)
            is_held = is_held or isinstance(fault, SwapHooks)
            freed += units if isinstance(fault, FreeEarly) else []

        def make() -> None:
            self.open_hooks.append((point, units))
            try:
                original(scheduler, names, subject)
                for name in freed:
                    scheduler._reshard(scheduler.units[name])
            finally:
                self.open_hooks.pop()

        if is_held:
            self.held_back.append(make)
            return
        if not is_lost:
            make()
        late, self.held_back = self.held_back, []
        for held in late:
            held()


def _matches(fault: _HookFault, point: str, units: Sequence[str], subject: str) -> bool:
    module = None if isinstance(fault, FreeEarly) else fault.module
    return (
        (fault.point is None or fault.point == point)
        and (fault.unit is None or fault.unit in units)
        and (module is None or module == subject)
    )


class Guard:
    """The faults that are in effect.

    Args:
        faults: All faults of a run; those of collectives and turns are the world's and are left
            alone.
        num_ranks: Number of ranks.
    """

    def __init__(self, faults: Sequence[Fault], num_ranks: int) -> None:
        self._ranks = [_RankGuard(faults, rank) for rank in range(num_ranks)]
        self.changes_waits = any(rank.waits for rank in self._ranks)
        # Waits are told apart by the hook that makes them.
        self.changes_hooks = self.changes_waits or any(rank.hooks for rank in self._ranks)
        self.changes_installs = any(rank.installs for rank in self._ranks)

    def here(self) -> _RankGuard | None:
        """Returns what belongs to the rank of the calling thread, or None outside a rank."""
        device = find_device()
        known = device is not None and device.index < len(self._ranks)
        return self._ranks[device.index] if device is not None and known else None

    def left_over(self) -> str | None:
        """Says which fault never came up, or None."""
        return next((text for rank in self._ranks if (text := rank.left_over())), None)


@contextmanager
def guarded(faults: Sequence[Fault], num_ranks: int) -> Iterator[Guard]:
    """Puts faults of waits, hooks, releases and installations into effect."""
    guard = Guard(faults, num_ranks)
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(swapped(owner, name, make))

        if guard.changes_waits:
            replace(Stream, "wait_stream", lambda original: _wait_stream(guard, original))
            replace(Stream, "wait_event", lambda original: _wait_event(guard, original))
        if guard.changes_hooks:
            for point in hook_points():
                replace(UnitScheduler, point, _hook_of(guard, point))
        if guard.changes_installs and _INSTALLER in sys.modules:
            owner = sys.modules[_INSTALLER]
            replace(owner, "install_hooks", lambda original: _install_twice(guard, original))
        yield guard


def _wait_stream(guard: Guard, original: Any) -> Any:
    def wait_stream(stream: Stream, other: Stream) -> None:
        rank = guard.here()
        if rank is None or not rank.drops(stream, other):
            original(stream, other)

    return wait_stream


def _wait_event(guard: Guard, original: Any) -> Any:
    def wait_event(stream: Stream, event: Event) -> None:
        rank = guard.here()
        if rank is None or not rank.drops(stream, event._newest_stream):
            original(stream, event)

    return wait_event


def _hook_of(guard: Guard, point: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def hook(scheduler: Any, names: Any, subject: str) -> None:
            rank = guard.here()
            if rank is None:
                original(scheduler, names, subject)
            else:
                rank.call(point, original, scheduler, names, subject)

        return hook

    return make


def _install_twice(guard: Guard, original: Any) -> Any:
    def install_hooks(root: Any, plan: Any, make_scheduler: Any, parameters: Any) -> Any:
        handle = original(root, plan, make_scheduler, parameters)
        rank = guard.here()
        if rank is not None and rank.installs:
            rank.num_installs += 1
            # The guard is a mark on the root: without it the same hooks go on once more.
            marks = {name: value for name, value in vars(root).items() if value is handle}
            for name in marks:
                delattr(root, name)
            original(root, plan, lambda _: handle.scheduler, parameters)
            root.__dict__.update(marks)
            for counted in rank.installs:
                counted.has_come_up = True
        return handle

    return install_hooks
