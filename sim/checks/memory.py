"""Bytes of FSDP buffers over time: what a rank holds at rest and at most.

Covers I3 and I20 in bytes. Looks at named storages and at the packed buffers that a unit's
reduction reads and writes, in host order, as the caching allocator counts them.

[Note: what is counted]
Shards (model weight, main weight) and main gradients are there from the first record; full weights
come and go by resize; packed and reduced gradient buffers by allocation, where the trace has
kernels. A main gradient buffer that MFSDP replaces (the outer axis of a hybrid mesh) is counted at
the size that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import Named, UnitKey, bound, declared_units, named_of, unit_or_none
from sim.checks.base import Reporter, Violation, unit_label
from sim.checks.rules import BOUND, PACKED_BOUND, REDUCTIONS, Judges, named, records_of
from sim.checks.units import is_ours, most_unsharded

FULL: Final = "full weight"
PACKED: Final = "packed gradient"
REDUCED: Final = "reduced gradient"
_STEP: Final = OpKind.STEP.value  # a plain string: every record is compared with it
_TRANSIENT: Final = (FULL, PACKED, REDUCED)
_KERNEL, _ALLOCATE, _FREE = (kind.value for kind in (OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE))


@dataclass(frozen=True, kw_only=True)
class FsdpBytes:
    """Bytes of the FSDP buffers of one rank [Note: what is counted].

    Attributes:
        resting: By kind, before the first step.
        at_peak: By kind, at the first moment of the highest sum.
        peak_seq: Number of the record that reached it.
    """

    resting: dict[str, int]
    at_peak: dict[str, int]
    peak_seq: int

    @property
    def resting_bytes(self) -> int:
        """All kinds at rest."""
        return sum(self.resting.values())

    @property
    def peak_bytes(self) -> int:
        """All kinds at the peak."""
        return sum(self.at_peak.values())

    def as_dict(self) -> dict[str, object]:
        """Returns it as plain data."""
        return {
            "resting_bytes": self.resting_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_record": self.peak_seq,
            "resting": self.resting,
            "at_peak": self.at_peak,
        }


def fsdp_bytes(trace: Trace) -> FsdpBytes | None:
    """Returns what FSDP's buffers take on one rank, or None when the trace names none."""
    live: Counter[str] = Counter()
    resting: dict[str, int] | None = None
    at_peak: dict[str, int] = {}
    peak, peak_seq = -1, 0
    for change in _changes(trace):
        if change.seq >= 0 and resting is None and change.is_step:
            resting = dict(live)
        live[change.kind] += change.bytes
        total = sum(live.values())
        if total > peak:
            peak, at_peak, peak_seq = total, dict(live), change.seq
    if peak <= 0:
        return None
    return FsdpBytes(
        resting=_known(resting if resting is not None else dict(live)),
        at_peak=_known(at_peak),
        peak_seq=peak_seq,
    )


_FULL_BYTES: Final = (named(FULL), records_of(OpKind.RESIZE), records_of(OpKind.STEP))
_GRADIENT_BYTES: Final = (records_of(OpKind.ALLOCATE), records_of(OpKind.FREE), REDUCTIONS)
JUDGES: Final = (
    Judges("I3", _FULL_BYTES),
    Judges("I3", _GRADIENT_BYTES, is_whole=False),
    Judges("I20", (*_FULL_BYTES, records_of(OpKind.UNIT), BOUND)),
    Judges("I20", (*_GRADIENT_BYTES, PACKED_BOUND), is_whole=False),
)


def most_packed(trace: Trace) -> int | None:
    """Returns how many units may have packed gradients at once, or None where nobody says.

    The target says it in the header; our hooks pack one unit's at a time.
    """
    declared = bound(trace, "packed")
    return 1 if declared is None and is_ours(trace) else declared


def kept_units(trace: Trace) -> set[UnitKey]:
    """Returns the units whose full weights stay over the border of a step, as the target says."""
    return {unit for unit, record in declared_units(trace).items() if record.get("kept")}


def check_memory(traces: Sequence[Trace]) -> list[Violation]:
    """Checks that every rank rests at its baseline and stays within the bound of its policy."""
    return [violation for trace in traces for violation in _check_rank(trace)]


@dataclass(frozen=True, slots=True)
class _Change:
    """A buffer that comes or goes; a border of a step changes nothing.

    Attributes:
        seq: Number of the record.
        unit: The buffer's unit.
        kind: What it holds.
        bytes: How much more there is.
        is_step: Whether it is the border of a step.
    """

    seq: int
    unit: UnitKey
    kind: str
    bytes: int
    is_step: bool = False


def _changes(trace: Trace) -> Iterator[_Change]:
    names: dict[int, Named] = {}
    gradients = _gradient_buffers(trace)
    sizes: dict[int, int] = {}
    named = {r["storage"] for r in trace.lean_records if r["op"] == OpKind.NAME}
    watched = named | gradients.keys()
    for record in trace.records:
        if record.get("storage") not in watched and record["op"] != _STEP:
            continue
        op = record["op"]
        if op == OpKind.ALLOCATE:
            if record["storage"] in gradients:
                owner = names[record["storage"]] = gradients[record["storage"]]
                sizes[record["storage"]] = record["bytes"]
                yield _Change(record["seq"], *owner, record["bytes"])
        elif op == OpKind.FREE:
            if record["storage"] in names:
                owner = names.pop(record["storage"])
                yield _Change(record["seq"], *owner, -sizes.pop(record["storage"], 0))
        elif op == OpKind.NAME:
            if record["storage"] not in names and "bytes" in record:
                holds = names[record["storage"]] = named_of(record)
                sizes[record["storage"]] = record["bytes"]
                yield _Change(record["seq"], *holds, record["bytes"])
        elif op == OpKind.RESIZE and record["storage"] in names:
            before = sizes[record["storage"]]
            sizes[record["storage"]] = record["bytes"]
            yield _Change(record["seq"], *names[record["storage"]], record["bytes"] - before)
        elif op == OpKind.STEP:
            yield _Change(record["seq"], UnitKey(0, ""), FULL, 0, is_step=True)


def _gradient_buffers(trace: Trace) -> dict[int, Named]:
    """Storages that a unit's reductions read and write, which are made for each of them.

    On a mesh of two axes only the first one reduces packed gradients; what the second one reads and
    writes is the unit's main gradient.
    """
    found: dict[int, Named] = {}
    first_axis: dict[UnitKey, str] = {}
    for record in trace.lean_records:
        if record["op"] == OpKind.COLLECTIVE and record["kind"] == "reduce_scatter":
            unit = unit_or_none(record)
            if unit is not None and first_axis.setdefault(unit, record["group"]) == record["group"]:
                for number in record["writes"]:
                    found.setdefault(number, Named(unit, REDUCED))
                for number in record["reads"]:
                    found[number] = Named(unit, PACKED)
    return found


def _known(by_kind: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in sorted(by_kind.items()) if count}


def _check_rank(trace: Trace) -> list[Violation]:
    reporter = Reporter(trace)
    live: Counter[tuple[UnitKey, str]] = Counter()
    full = {unit: record["bytes"] for unit, record in declared_units(trace).items()}
    num_units = most_unsharded(trace)
    most_bytes = (
        None
        if num_units is None or not full
        else sum(sorted(full.values(), reverse=True)[:num_units])
    )
    packed: set[UnitKey] = set()
    packed_bound = most_packed(trace)
    kept = kept_units(trace)
    for change in _changes(trace):
        if change.is_step:
            for (unit, kind), count in sorted(live.items()):
                if count and kind in _TRANSIENT and unit not in kept:
                    reporter.report(
                        "I3",
                        f"{count} bytes of {kind} of unit {unit_label(unit)} are not released at "
                        "the border of a step.",
                        unit=unit,
                        seq=change.seq,
                    )
                    live[unit, kind] = 0
            continue
        live[change.unit, change.kind] += change.bytes
        if change.kind == FULL and most_bytes is not None and change.bytes > 0:
            total = sum(count for (_, kind), count in live.items() if kind == FULL)
            if total > most_bytes:
                reporter.report(
                    "I20",
                    f"Expected at most {most_bytes} bytes of full weights ({num_units} units), got "
                    f"{total}.",
                    unit=change.unit,
                    seq=change.seq,
                )
                most_bytes = None  # once a run: the rest follows from it
        elif change.kind == PACKED:
            if live[change.unit, PACKED]:
                packed.add(change.unit)
            else:
                packed.discard(change.unit)
            if packed_bound is not None and len(packed) > packed_bound and change.bytes > 0:
                at_once = "one unit" if packed_bound == 1 else f"{packed_bound} units"
                reporter.report(
                    "I20",
                    f"Expected packed gradients of {at_once} at a time, got those of "
                    f"{', '.join(str(unit_label(unit)) for unit in sorted(packed))}.",
                    unit=change.unit,
                    seq=change.seq,
                )
                packed = {change.unit}
    return reporter.found
