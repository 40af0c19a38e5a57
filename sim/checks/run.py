"""Runs all checks on the traces of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import Trace
from sim.checks.base import Check, Violation
from sim.checks.collectives import check_collectives
from sim.checks.storage import check_storage
from sim.checks.units import check_units
from sim.checks.uses import check_uses

CHECKS: Final[dict[str, Check]] = {
    "storage": check_storage,
    "units": check_units,
    "uses": check_uses,
    "collectives": check_collectives,
}


def check_traces(traces: Sequence[Trace]) -> list[Violation]:
    """Returns everything that is broken in the traces of all ranks of one run."""
    return [violation for check in CHECKS.values() for violation in check(traces)]
