"""Checks: pure functions from traces to violations. They do not care which mode wrote the trace."""

from sim.checks.base import Access, Check, Violation
from sim.checks.memory import FsdpBytes, fsdp_bytes
from sim.checks.numerics import RULES_BY_VALUE, check_numerics
from sim.checks.rules import RULES, Rule
from sim.checks.run import CHECKS, JUDGES, check_traces, declared_units, judge
from sim.checks.verdict import UnknownRule, Verdict, required_rules

__all__ = [
    "CHECKS",
    "JUDGES",
    "RULES",
    "RULES_BY_VALUE",
    "Access",
    "Check",
    "FsdpBytes",
    "Rule",
    "UnknownRule",
    "Verdict",
    "Violation",
    "check_numerics",
    "check_traces",
    "declared_units",
    "fsdp_bytes",
    "judge",
    "required_rules",
]
