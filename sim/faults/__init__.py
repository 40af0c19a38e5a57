"""Disturbances of a run, as values; `sim.world` and `sim.fuzz` put them into effect."""

from sim.faults.text import FaultError, format_fault, parse_fault
from sim.faults.values import (
    ROLES,
    DelayRank,
    DoubleInstall,
    DropWait,
    Fault,
    FreeEarly,
    LoseCallback,
    LoseCompletion,
    SkipCollective,
    StallCollective,
    StallStream,
    SwapCollectives,
    SwapHooks,
    hook_points,
    is_stall,
    needs_kernels,
)

__all__ = [
    "ROLES",
    "DelayRank",
    "DoubleInstall",
    "DropWait",
    "Fault",
    "FaultError",
    "FreeEarly",
    "LoseCallback",
    "LoseCompletion",
    "SkipCollective",
    "StallCollective",
    "StallStream",
    "SwapCollectives",
    "SwapHooks",
    "format_fault",
    "hook_points",
    "is_stall",
    "needs_kernels",
    "parse_fault",
]
