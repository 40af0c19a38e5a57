"""Turns a plan into the scheduler that drives its units; knows nothing of Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from real.hooks.plan import HookPlan
from real.hooks.scheduler import Prefetch, ScheduledUnit, UnitScheduler
from real.hooks.unit import FsdpContext, FsdpUnit


def build_scheduler(
    plan: HookPlan,
    context: FsdpContext,
    units: Mapping[str, FsdpUnit],
    *,
    grad_divisors: Mapping[str, int] | None = None,
    prefetch: Prefetch = Prefetch.NONE,
    forward_order: Sequence[str] = (),
    fence_owner: str | None = "finish_grad_sync",
    is_counted: Callable[[str], bool] = lambda _: True,
) -> UnitScheduler:
    """Returns the scheduler of a plan's units.

    Args:
        plan: A valid plan.
        context: What the units share.
        units: The plan's units by name.
        grad_divisors: Divisor of a unit's gradients before they are reduced, by unit name; 1 for
            the others.
        prefetch: Which gathers are issued one unit ahead.
        forward_order: Names of the units in the order in which forward uses them.
        fence_owner: Who calls `finish_grad_sync`; None makes every reduction an error.
        is_counted: Whether the gradient of a parameter, given its name, is waited for.
    """
    divisors = grad_divisors or {}
    fires: dict[str, dict[str, int]] = {name: {} for name in units}
    for gradient in plan.gradients:
        if is_counted(gradient.parameter):
            fires[gradient.unit][gradient.parameter] = gradient.fires
    # What the root's own release gives back has no release of the schedule.
    kept = plan.releases[""]
    scheduled = {
        name: ScheduledUnit(
            unit,
            fires=fires[name],
            is_released_by_schedule=name not in kept,
            grad_divisor=divisors.get(name, 1),
            delayed=[g.parameter for g in plan.gradients if g.is_delayed and g.unit == name],
        )
        for name, unit in units.items()
    }
    return UnitScheduler(
        context,
        scheduled,
        prefetch=prefetch,
        forward_order=forward_order,
        fence_owner=fence_owner,
    )
