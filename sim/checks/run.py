"""Runs all checks on the traces of a run, and says what they could judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from real.reach import Reach
from real.trace import Trace, why_not_whole
from real.trace.typed import Parameter, select
from sim.checks import (
    accumulation,
    capture,
    collectives,
    fences,
    gradients,
    hygiene,
    memory,
    ownership,
    phases,
    recompute,
    storage,
    units,
    uses,
    versions,
)
from sim.checks.accumulation import check_accumulation
from sim.checks.base import Check, Violation
from sim.checks.capture import check_capture
from sim.checks.collectives import check_collectives
from sim.checks.fences import check_fences
from sim.checks.gradients import check_gradients
from sim.checks.hygiene import check_hygiene
from sim.checks.memory import check_memory, kept_units
from sim.checks.ownership import check_ownership
from sim.checks.phases import check_phases
from sim.checks.recompute import check_recompute
from sim.checks.rules import RULES, Judges
from sim.checks.storage import check_storage
from sim.checks.units import check_units
from sim.checks.uses import check_uses
from sim.checks.verdict import Verdict, unseen
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

JUDGES: Final[dict[str, tuple[Judges, ...]]] = {
    "storage": storage.JUDGES,
    "units": units.JUDGES,
    "gradients": gradients.JUDGES,
    "fences": fences.JUDGES,
    "uses": uses.JUDGES,
    "collectives": collectives.JUDGES,
    "accumulation": accumulation.JUDGES,
    "ownership": ownership.JUDGES,
    "hygiene": hygiene.JUDGES,
    "recompute": recompute.JUDGES,
    "phases": phases.JUDGES,
    "capture": capture.JUDGES,
    "memory": memory.JUDGES,
    "versions": versions.JUDGES,
}
"""What each check judges, and what it needs for that."""


def check_traces(traces: Sequence[Trace], *, replay: str | None = None) -> list[Violation]:
    """Returns everything that is broken in the traces of all ranks of one run.

    Args:
        traces: One entry a rank.
        replay: The command that repeats the run, for the reports.
    """
    found = [violation for check in CHECKS.values() for violation in check(traces)]
    return [replace(violation, replay=replay) for violation in found] if replay else found


def judge(
    traces: Sequence[Trace],
    *,
    require: Sequence[str] = (),
    also: Collection[str] = (),
    replay: str | None = None,
) -> Verdict:
    """Judges the traces of all ranks of one run, and says which rules that took in.

    Args:
        traces: One entry a rank.
        require: Rules that must be judged.
        also: Rules that something else than a trace has judged.
        replay: The command that repeats the run, for the reports.
    """
    violations = check_traces(traces, replay=replay)
    broken = {violation.rule for violation in violations}
    every = [judges for of_check in JUDGES.values() for judges in of_check]
    partly, not_judged = unseen(traces, every, also)
    kept = sorted({str(unit) for trace in traces for unit in kept_units(trace)})
    if kept and "I3" not in not_judged:
        told = f"the target keeps {', '.join(kept)} gathered"
        partly["I3"] = "; ".join(filter(None, [partly.get("I3"), told]))
    for rule in broken & not_judged.keys():  # who is found out was judged
        partly[rule] = not_judged.pop(rule)
    reach = Reach(
        judged=tuple(rule for rule in RULES if rule not in not_judged),
        partly=partly,
        not_judged=not_judged,
        required=tuple(require),
        incomplete=tuple(why_not_whole(traces)),
    )
    return Verdict(violations=tuple(violations), reach=reach)


def declared_units(trace: Trace) -> dict[str, str]:
    """Returns the unit of each parameter that a trace declares."""
    return {
        record["parameter"]: record["unit"]
        for record in select(trace.lean_records, Parameter)
        if record["unit"] is not None
    }
