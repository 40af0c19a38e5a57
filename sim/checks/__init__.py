"""Checks: pure functions from traces to violations. They do not care which mode wrote the trace."""

from sim.checks.base import Access, Check, Violation
from sim.checks.run import CHECKS, check_traces

__all__ = ["CHECKS", "Access", "Check", "Violation", "check_traces"]
