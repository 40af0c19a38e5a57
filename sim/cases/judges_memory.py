"""I20 for gradients: how much one reduction packs, and how long full gradients stay.

* `check_reduce_inputs`: no reduction packs more than the largest layer or parameter.
* `check_kept_gradients`: full gradients go when their unit is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from real.trace import OpKind, Trace
from real.trace.read import walk
from sim.checks import Violation
from sim.checks.base import unit_label


def check_reduce_inputs(traces: Sequence[Trace]) -> list[Violation]:
    """Compares the bytes of each packed reduce input with the largest layer and parameter."""
    found = []
    for trace in traces:
        most = max(
            (
                r["bytes"] if r["op"] == OpKind.UNIT else 2 * math.prod(r["shape"])
                for r in trace.records
                if r["op"] == OpKind.PARAMETER
                or (r["op"] == OpKind.UNIT and r["unit"].startswith("decoder.layers."))
            ),
            default=0,
        )
        seen: set[str] = set()
        for record, place in walk(trace.records):
            if record["op"] != OpKind.COLLECTIVE or record["kind"] != "reduce_scatter":
                continue
            unit = record["unit"]
            if unit is None or unit in seen or record["bytes"] <= most:
                continue
            seen.add(unit)
            found.append(
                Violation(
                    rule="I20",
                    rank=trace.rank,
                    message=f"Expected reduce inputs of at most {most} bytes, the largest layer "
                    f"or parameter, got {record['bytes']}.",
                    unit=unit_label(unit),
                    node=place.node,
                    microbatch=place.microbatch,
                    seq=record["seq"],
                )
            )
    return found


def check_kept_gradients(traces: Sequence[Trace]) -> list[Violation]:
    """Looks for full gradients of one unit that live on when another unit is complete.

    Gradients are named "full gradient" in the trace when their unit is complete.
    """
    found = []
    for trace in traces:
        live: dict[int, str] = {}
        reported: set[str] = set()
        for record, place in walk(trace.records):
            if record["op"] == OpKind.FREE:
                live.pop(record["storage"], None)
            elif record["op"] == OpKind.NAME and record["kind"] == "full gradient":
                unit = record["unit"]
                for kept in sorted(set(live.values()) - {unit} - reported):
                    reported.add(kept)
                    found.append(
                        Violation(
                            rule="I20",
                            rank=trace.rank,
                            message=f"The full gradients of unit {unit_label(kept)} are kept when "
                            f"unit {unit_label(unit)} is complete.",
                            unit=unit_label(kept),
                            node=place.node,
                            microbatch=place.microbatch,
                            seq=record["seq"],
                        )
                    )
                live[record["storage"]] = unit
    return found
