"""I21: filling a unit's full parameters again must not move the version of saved weights.

Autograd notes the version of what it saves and refuses a backward over a newer one. A version that
moves is a fault even where nothing was saved yet: the next graph may hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import UnitKey, unit_key
from real.trace.typed import WeightVersion, select
from sim.checks.base import Reporter, Violation
from sim.checks.rules import Judges, records_of

JUDGES: Final = (Judges("I21", (records_of(OpKind.WEIGHT_VERSION),)),)


def check_versions(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the versions of every unit's full parameters after each gather."""
    return [violation for trace in traces for violation in _check_rank(trace)]


def _check_rank(trace: Trace) -> list[Violation]:
    reporter = Reporter(trace)
    versions: dict[UnitKey, tuple[int, int]] = {}
    reported: set[UnitKey] = set()
    for record in select(trace.lean_records, WeightVersion):
        unit, version = unit_key(record), record["version"]
        before = versions.get(unit)
        if before is not None and version != before[0] and unit not in reported:
            reported.add(unit)
            reporter.report(
                "I21",
                f"The gather of unit {unit} moved the version counters of its full "
                f"weights from {before[0]} (record {before[1]}) to {version}: autograd refuses "
                "what it saved before.",
                unit=unit,
                seq=record["seq"],
            )
        versions[unit] = version, record["seq"]
    return reporter.found
