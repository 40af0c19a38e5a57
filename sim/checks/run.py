"""Runs all checks on the traces of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from real.trace import OpKind, Trace
from sim.checks.accumulation import check_accumulation
from sim.checks.base import Check, Violation
from sim.checks.capture import check_capture
from sim.checks.collectives import check_collectives
from sim.checks.fences import check_fences
from sim.checks.gradients import check_gradients
from sim.checks.hygiene import check_hygiene
from sim.checks.memory import check_memory
from sim.checks.ownership import check_ownership
from sim.checks.phases import check_phases
from sim.checks.recompute import check_recompute
from sim.checks.storage import check_storage
from sim.checks.units import check_units
from sim.checks.uses import check_uses
from sim.checks.versions import check_versions

CHECKS: Final[dict[str, Check]] = {
    "storage": check_storage,
    "units": check_units,
    "gradients": check_gradients,
    "fences": check_fences,
    "uses": check_uses,
    "collectives": check_collectives,
    "accumulation": check_accumulation,
    "ownership": check_ownership,
    "hygiene": check_hygiene,
    "recompute": check_recompute,
    "phases": check_phases,
    "capture": check_capture,
    "memory": check_memory,
    "versions": check_versions,
}


def check_traces(traces: Sequence[Trace], *, replay: str | None = None) -> list[Violation]:
    """Returns everything that is broken in the traces of all ranks of one run.

    Args:
        traces: One entry a rank.
        replay: The command that repeats the run, for the reports.
    """
    found = [violation for check in CHECKS.values() for violation in check(traces)]
    return [replace(violation, replay=replay) for violation in found] if replay else found


def declared_units(trace: Trace) -> dict[str, str]:
    """Returns the unit of each parameter that a trace declares."""
    return {
        record["parameter"]: record["unit"]
        for record in trace.lean_records
        if record["op"] == OpKind.PARAMETER and record["unit"] is not None
    }
