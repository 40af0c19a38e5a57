"""Decides, at each hook point, what happens to which unit.

The schedule calls submodules of several layers and of two microbatches in turn; nobody calls the
unit's own module. So a unit is driven from three sides: submodules that are about to read its
parameters (demand unshard), the schedule's forward release, and its own gradients (countdown).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from real.hooks import ordering
from real.hooks.completion import GradientCountdown
from real.hooks.errors import ContractError
from real.hooks.lifecycle import UnitEvent, UnitLifecycle, UnitPhase
from real.hooks.unit import FsdpContext, FsdpUnit
from real.trace import OpKind, active_recorder

if TYPE_CHECKING:
    from collections.abc import Iterator


class Prefetch(StrEnum):
    """Which gathers are issued one unit ahead of their consumer."""

    NONE = "none"
    FORWARD = "forward"
    BOTH = "both"


class ScheduledUnit:
    """One FSDP unit with its life, its countdown and the streams that have joined its gather.

    Args:
        unit: The unit.
        fires: Expected gradients per microbatch by parameter name; empty for a frozen unit.
        is_released_by_schedule: Whether the schedule calls the forward release; otherwise the
            forward interval ends with the backward, since the schedule has no later point.
        grad_divisor: Divides the gradients before they are reduced.
        delayed: Names of the parameters whose gradient comes from a later weight-gradient call.
    """

    def __init__(
        self,
        unit: FsdpUnit,
        *,
        fires: Mapping[str, int],
        is_released_by_schedule: bool,
        grad_divisor: int = 1,
        delayed: Collection[str] = (),
    ) -> None:
        self.unit = unit
        self.name = unit.name
        self.lifecycle = UnitLifecycle(unit.name)
        self.countdown = GradientCountdown(unit.name, fires)
        self.is_trainable = bool(fires)
        self.is_released_by_schedule = is_released_by_schedule
        self.grad_divisor = grad_divisor
        self.delayed = frozenset(delayed)
        self.joined_streams: list[torch.cuda.Stream] = []
        # All gradients of this microbatch have come: whatever uses the unit now comes too late.
        self.is_complete = False
        # Gradients have been reduced, and the end of the node that completes them is still to come.
        self.is_reduced = False
        # The backward has asked for it; an open interval may be a prefetch alone.
        self.is_asked_for = False
        self.next_forward: ScheduledUnit | None = None
        self.next_backward: ScheduledUnit | None = None
        self.post_backward_hooks: OrderedDict[int, Callable[[nn.Module], None]] = OrderedDict()


class UnitScheduler:
    """Drives all units of one root.

    Args:
        context: What the units share.
        units: The units by name.
        prefetch: Which gathers are issued ahead.
        forward_order: Names of the units in the order in which forward uses them; backward uses
            them in the opposite order.
        fence_owner: Who calls `finish_grad_sync`; None makes every reduction an error.
    """

    def __init__(
        self,
        context: FsdpContext,
        units: Mapping[str, ScheduledUnit],
        *,
        prefetch: Prefetch = Prefetch.NONE,
        forward_order: Sequence[str] = (),
        fence_owner: str | None = None,
    ) -> None:
        self.context = context
        self.units = dict(units)
        self._fence_owner = fence_owner
        # The optimizer may write weights at any time before the first gather and after each fence.
        self._needs_fork = True
        self._link(forward_order, prefetch)

    def _link(self, order: Sequence[str], prefetch: Prefetch) -> None:
        ordered = [self.units[name] for name in order]
        for unit, successor in itertools.pairwise(ordered):
            if prefetch is not Prefetch.NONE:
                unit.next_forward = successor
            if prefetch is Prefetch.BOTH:
                successor.next_backward = unit

    # -- hook points ------------------------------------------------------------------------

    def pre_forward(self, name: str, module: str) -> None:
        """A submodule of unit `name` is about to run forward."""
        unit = self.units[name]
        _record_hook("pre_forward", module, name)
        if _is_inside_backward():
            # A recomputed forward: the unit's backward has it open, and must stay its only owner.
            self._unshard(unit, UnitEvent.BACKWARD_USE, module)
            return
        unit.is_complete = False
        self._unshard(unit, UnitEvent.FORWARD_USE, module)
        if unit.next_forward is not None:
            self._prefetch(unit.next_forward, UnitEvent.FORWARD_USE, module)

    def pre_backward(self, name: str, module: str) -> None:
        """A submodule of unit `name` is about to run backward."""
        _record_hook("pre_backward", module, name)
        self._open_backward(self.units[name], module)

    def post_forward(self, names: Sequence[str], module: str) -> None:
        """A module that was called as a whole has run forward: its units' forward use ends.

        The combined schedule calls no layer as a whole, so this is the plain schedule's release.
        A recomputed forward releases nothing: its backward is about to read the same weights.
        """
        _record_hook("post_forward", module, names[0])
        if not _is_inside_backward():
            self.release_forward(names, f"end of {module or '<root>'}")

    def post_gradient(self, name: str, parameter: str) -> None:
        """One gradient of a parameter of unit `name` has been accumulated."""
        unit = self.units[name]
        _record_hook("post_gradient", parameter, name)
        unit.lifecycle.step(UnitEvent.GRADIENT, parameter)
        if unit.countdown.count(parameter):
            unit.is_complete = True
            self._finish_backward(unit, parameter)

    def end_of_first_use(self, names: Sequence[str], cause: str) -> None:
        """The node that first reads these units in backward has run: they are unsharded by now.

        On a rank where nothing of a unit ran backward, it is gathered here: the other ranks have
        gathered it inside the node, and nothing else of its communicator has come in between.
        """
        for name in names:
            unit = self.units[name]
            if unit.is_asked_for:
                continue
            if unit.lifecycle.phase in (UnitPhase.BACKWARD, UnitPhase.BOTH):
                self._prefetch_backward(unit, cause)  # it was prefetched itself, or recomputed
            else:
                self._open_backward(unit, cause)

    def end_backward(self, names: Sequence[str], cause: str) -> None:
        """The node that completes these units' gradients has run; once for each microbatch.

        Where every parameter was used, the last gradient has reduced the unit inside the node. On
        the other ranks it is reduced here, with zeros for what was not used. So the place of the
        reduction among the collectives is that of the node, whatever the data was. A frozen unit
        is not reduced.

        Raises:
            ContractError: A unit's gradients are not what was declared.
        """
        for name in names:
            unit = self.units[name]
            was_reduced, unit.is_reduced = unit.is_reduced, False
            if was_reduced or not unit.is_trainable:
                continue
            _record_hook("end_backward", name, name)
            self.end_of_first_use([name], cause)
            unit.is_complete = True
            self._zero_fill(unit, cause)
            self._finish_backward(unit, cause)
            unit.is_reduced = False

    def release_forward(self, names: Sequence[str], cause: str) -> None:
        """The schedule is done with the forward of these units. Repeated calls do nothing."""
        for name in names:
            unit = self.units[name]
            before = unit.lifecycle.phase
            if unit.lifecycle.step(UnitEvent.FORWARD_RELEASE, cause) is UnitPhase.RESTING:
                if before is not UnitPhase.RESTING:
                    self._reshard(unit)

    def release_backward(self, names: Sequence[str], cause: str) -> None:
        """The schedule has run every backward node of these units: close what is still open.

        A frozen unit is released here. A trainable parameter without a gradient was not used: its
        gradient is zero. That is how the root ends, which no node of a layer completes.

        Raises:
            ContractError: A unit was used in backward after its last gradient, or its gradients are
                not what was declared.
        """
        for name in names:
            unit = self.units[name]
            was_complete, unit.is_complete = unit.is_complete, False
            if unit.lifecycle.phase not in (UnitPhase.BACKWARD, UnitPhase.BOTH):
                continue
            if was_complete and not unit.countdown.is_started:
                raise ContractError(
                    f"Expected no use of FSDP unit {unit.name or '<root>'!r} between its last "
                    f"gradient and {cause}, got it unsharded again: a backward hook ran late.",
                    rule="I3",
                    unit=unit.name,
                )
            if not unit.is_trainable:
                self._close_backward(unit, cause)
            else:
                self._zero_fill(unit, cause)
                self._finish_backward(unit, cause)

    # -- public calls -----------------------------------------------------------------------

    def unshard(self, name: str) -> None:
        """Makes a unit's full parameters usable on the current stream, for a forward use.

        For callers outside the schedule. Repeated calls gather once. The caller owes one
        `reshard`; the wait of the all-gather stream for the optimizer's writes is made here.
        """
        self._unshard(self.units[name], UnitEvent.FORWARD_USE, "unshard()")

    def reshard(self, name: str) -> None:
        """Ends a forward use begun by `unshard`. Repeated calls do nothing."""
        self.release_forward([name], "reshard()")

    def finish_grad_sync(self) -> None:
        """The current stream waits for every reduction: gradients may be read after this.

        Raises:
            ContractError: A unit's gradients are not complete, or a unit is still unsharded; the
                message names parameters or units.
        """
        self.release_backward(list(self.units), "finish_grad_sync")
        self._check_resting()
        ordering.join_reduce_scatter(self.context)
        self._needs_fork = True

    def register_post_backward_hook(
        self, name: str, hook: Callable[[nn.Module], None]
    ) -> RemovableHandle:
        """Calls `hook` with the unit's module each time its reduction has been launched.

        Several hooks of one unit run in the order of their registration.
        """
        hooks = self.units[name].post_backward_hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    # -- steps ------------------------------------------------------------------------------

    def _unshard(self, unit: ScheduledUnit, event: UnitEvent, cause: str) -> None:
        unit.lifecycle.step(event, cause)
        self._gather(unit)
        current = torch.cuda.current_stream()
        if current not in unit.joined_streams:
            ordering.join_unshard(unit.unit)
            unit.joined_streams.append(current)

    def _open_backward(self, unit: ScheduledUnit, cause: str) -> None:
        unit.is_asked_for = True
        self._unshard(unit, UnitEvent.BACKWARD_USE, cause)
        self._prefetch_backward(unit, cause)

    def _prefetch_backward(self, unit: ScheduledUnit, cause: str) -> None:
        if unit.next_backward is not None:
            self._prefetch(unit.next_backward, UnitEvent.BACKWARD_USE, cause)

    def _prefetch(self, unit: ScheduledUnit, event: UnitEvent, cause: str) -> None:
        unit.lifecycle.step(event, cause)
        self._gather(unit)

    def _gather(self, unit: ScheduledUnit) -> None:
        if unit.unit.unshard_event is not None:
            unit.unit.unshard()  # has nothing to do, and shows who watches it that we rely on it
            return
        if self._needs_fork or not unit.name:
            ordering.fork_all_gather(self.context)
            self._needs_fork = False
        with _profiled(unit, "unshard"):
            unit.unit.unshard()
        unit.joined_streams = []

    def _reshard(self, unit: ScheduledUnit) -> None:
        with _profiled(unit, "reshard"):
            unit.unit.reshard()
        unit.joined_streams = []

    def _close_backward(self, unit: ScheduledUnit, cause: str) -> None:
        unit.is_asked_for = False
        after = unit.lifecycle.step(UnitEvent.BACKWARD_END, cause)
        if after is UnitPhase.FORWARD and not unit.is_released_by_schedule:
            # The next microbatch's forward has passed its last use of this unit by now.
            after = unit.lifecycle.step(UnitEvent.FORWARD_RELEASE, cause)
        if after is UnitPhase.RESTING:
            self._reshard(unit)

    def _finish_backward(self, unit: ScheduledUnit, cause: str) -> None:
        if self._fence_owner is None:
            raise ContractError(
                f"Cannot reduce FSDP unit {unit.name or '<root>'!r} before somebody owns the final "
                "wait; construct the scheduler with fence_owner and call finish_grad_sync().",
                rule="I8",
                unit=unit.name,
            )
        # Full weights go before the packed gradient buffer comes: both at once would be the peak.
        self._close_backward(unit, cause)
        self._check_present(unit)
        if unit.grad_divisor != 1:
            grads = [p.grad for p in unit.unit.trainable_parameters.values() if p.grad is not None]
            torch._foreach_div_(grads, unit.grad_divisor)
        with _profiled(unit, "reduce"):
            unit.unit.reduce_gradients()
        unit.is_reduced = True
        if self._needs_fork:
            # No gather since the last fence: whoever waited there did not wait for this one.
            ordering.join_reduce_scatter(self.context)
        for hook in list(unit.post_backward_hooks.values()):
            hook(unit.unit.module)

    def _check_present(self, unit: ScheduledUnit) -> None:
        for name, parameter in unit.unit.trainable_parameters.items():
            if parameter.grad is None:
                is_delayed = name in unit.delayed
                source = "its delayed weight gradient" if is_delayed else "a gradient"
                raise ContractError(
                    f"Expected {source} of {name!r} before FSDP unit {unit.name or '<root>'!r} "
                    "reduces, got none.",
                    rule="I7" if is_delayed else "I6",
                    unit=unit.name,
                )

    def _check_resting(self) -> None:
        awake = [
            unit
            for unit in self.units.values()
            if unit.lifecycle.phase is not UnitPhase.RESTING or unit.unit.unshard_event is not None
        ]
        if awake:
            listed = (f"{unit.name or '<root>'} ({unit.lifecycle.phase.value})" for unit in awake)
            raise ContractError(
                "Expected every FSDP unit sharded and resting at the end of the step, got these "
                f"still unsharded: {', '.join(listed)}.",
                rule="I3",
                unit=awake[0].name,
            )

    def _zero_fill(self, unit: ScheduledUnit, cause: str) -> None:
        short = unit.countdown.short()
        if short:
            raise ContractError(
                f"Expected every declared gradient of {', '.join(short)} in FSDP unit "
                f"{unit.name or '<root>'!r} by the end of its backward, got fewer.",
                rule="I5",
                unit=unit.name,
            )
        parameters = unit.unit.trainable_parameters
        for name in unit.countdown.missing():
            if parameters[name].grad is not None:
                raise ContractError(
                    f"Expected a completion hook for the gradient of {name!r} in FSDP unit "
                    f"{unit.name or '<root>'!r}, got the gradient without one.",
                    rule="I5",
                    unit=unit.name,
                )
            if name in unit.delayed:
                # Zeros would take the place of a gradient that is still to be made.
                raise ContractError(
                    f"Expected the delayed weight gradient of {name!r} in FSDP unit "
                    f"{unit.name or '<root>'!r} by {cause}, got none: its backward_dw() has not "
                    "run.",
                    rule="I7",
                    unit=unit.name,
                )
            parameters[name].grad = torch.zeros_like(parameters[name])
            active_recorder().record(OpKind.ZERO_FILL, unit=unit.name, parameter=name)
        unit.countdown.rearm()


@contextmanager
def _profiled(unit: ScheduledUnit, action: str) -> Iterator[None]:
    """Shows work on a unit to profilers.

    A context manager, so that no early return or error leaves the profiler range open.
    """
    torch.cuda.nvtx.range_push(f"MFSDP {unit.name or '<root>'} {action}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _record_hook(point: str, module: str, unit: str) -> None:
    recorder = active_recorder()
    if recorder.is_recording:
        # Autograd is asked here again: the record must not depend on what the hook makes of it.
        is_in_backward = torch._C._current_graph_task_id() != -1
        recorder.record(
            OpKind.HOOK, point=point, module=module, unit=unit, in_backward=is_in_backward
        )


def _is_inside_backward() -> bool:
    """Whether autograd is running: a forward seen now is a recomputed one."""
    return torch._C._current_graph_task_id() != -1
