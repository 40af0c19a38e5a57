"""Checks: pure functions from traces to violations. They do not care which mode wrote the trace."""

from sim.checks.base import Access, Check, Violation
from sim.checks.memory import FsdpBytes, fsdp_bytes
from sim.checks.numerics import check_numerics
from sim.checks.run import CHECKS, check_traces, declared_units

__all__ = [
    "CHECKS",
    "Access",
    "Check",
    "FsdpBytes",
    "Violation",
    "check_numerics",
    "check_traces",
    "declared_units",
    "fsdp_bytes",
]
