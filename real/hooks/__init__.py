"""The hook-installation code that joins MFSDP v2 to the combined 1F1B schedule."""

from real.hooks.build import build_scheduler
from real.hooks.errors import ContractError
from real.hooks.install import HookHandle, install_hooks
from real.hooks.lifecycle import IllegalStep, UnitPhase
from real.hooks.plan import HookPlan, build_plan
from real.hooks.scheduler import Prefetch, ScheduledUnit, UnitScheduler
from real.hooks.unit import FsdpContext, FsdpUnit

__all__ = [
    "ContractError",
    "FsdpContext",
    "FsdpUnit",
    "HookHandle",
    "HookPlan",
    "IllegalStep",
    "Prefetch",
    "ScheduledUnit",
    "UnitPhase",
    "UnitScheduler",
    "build_plan",
    "build_scheduler",
    "install_hooks",
]
