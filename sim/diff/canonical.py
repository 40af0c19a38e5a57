"""The canonical form of a trace: one line a record, without what differs between equal runs.

Streams have roles instead of numbers, groups their ranks, and a wait names the record it waits for
by where that record was made. Storages and events have no names at all. What remains is what a
simulated and a real run must have in common, in the same order.

[Note: naming a record]
A wait refers to one record of an event. Counting records from the beginning of a step would change
every later line when one is added; so they are counted from the newest node, hook or profiler
range, and those from the beginning of the step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from real.trace import OpKind, Trace
from real.trace.record import OPTIONAL
from real.trace.recorder import Record
from sim.diff.allowances import (
    ACTIVATION,
    KERNELS,
    MFSDP_RANGE,
    NUMBERS,
    RANGES,
    ROUTED,
    VERSIONS,
    Allowance,
)

SETUP: Final = "setup"
"""Name of what comes before the first step."""


class Line(NamedTuple):
    """One record in canonical form.

    Attributes:
        text: What must be equal.
        seq: Number of the record.
        place: The section of the trace, as "step 0".
        detail: What may differ, or None.
        allowance: Why it may, or None.
    """

    text: str
    seq: int
    place: str
    detail: str | None = None
    allowance: Allowance | None = None


@dataclass(frozen=True, kw_only=True)
class CanonicalTrace:
    """One rank's trace in canonical form.

    Attributes:
        rank: The rank.
        lines: One a record, in host order.
        left_out: How many records were left out, by the allowance that says why.
    """

    rank: int
    lines: list[Line]
    left_out: Counter[Allowance] = field(default_factory=Counter)


def canonical(trace: Trace) -> CanonicalTrace:
    """Returns the canonical form of one rank's trace."""
    writer = _Writer(trace)
    for record in trace.records:
        writer.add(record)
    return CanonicalTrace(rank=trace.rank, lines=writer.lines, left_out=writer.left_out)


def canonical_text(trace: Trace) -> str:
    """Returns the canonical form as text, one line a record."""
    return "".join(f"{line.text}\n" for line in canonical(trace).lines)


def stream_roles(records: Sequence[Record]) -> dict[int, str]:
    """Names the streams of a trace by what is first seen on them.

    The compute stream is where the gradients are read and the weights written; a stream that has a
    role keeps it, so a gather on the compute stream reads as that.
    """
    roles: dict[int, str] = {}
    for role, is_sign in _ROLE_SIGNS:
        for record in records:
            if is_sign(record):
                roles.setdefault(record["stream"], role)
                break
    num_side = 0
    for record in records:
        stream = record.get("stream")
        if stream is not None and record["op"] != OpKind.STREAM and stream not in roles:
            num_side += 1
            roles[stream] = f"side{num_side}"
    return roles


def _is_unit_call(record: Record, *kinds: str) -> bool:
    return (
        record["op"] == OpKind.COLLECTIVE and record["unit"] is not None and record["kind"] in kinds
    )


_ROLE_SIGNS: Final[tuple[tuple[str, Callable[[Record], bool]], ...]] = (
    (
        "compute",
        lambda r: r["op"] in (OpKind.FENCE, OpKind.GRAD_READ, OpKind.OPTIMIZER_STEP),
    ),
    ("compute", lambda r: r["op"] in (OpKind.NODE, OpKind.UNSHARD)),
    ("all_gather", lambda r: _is_unit_call(r, "all_gather")),
    ("reduce_scatter", lambda r: _is_unit_call(r, "reduce_scatter", "all_reduce")),
    ("comm", lambda r: r["op"] == OpKind.COLLECTIVE and r["kind"] == "all_to_all_single"),
)


_NUMBERS: Final = frozenset({"seq", "op", "records", "storage", "graph", "model", *OPTIONAL})
"""Fields that are numbers of things, or times."""


class _Writer:
    def __init__(self, trace: Trace) -> None:
        self._rank = trace.rank
        self._roles = stream_roles(trace.records)
        self.lines: list[Line] = []
        self.left_out: Counter[Allowance] = Counter()
        self._groups: dict[str, str] = {}
        self._ranks: dict[str, list[int]] = {}
        self._calls: Counter[str] = Counter()
        self._place = SETUP
        self._anchor = SETUP
        self._anchors: Counter[str] = Counter()
        self._records_here: Counter[int] = Counter()
        self._record_names: dict[int, str] = {}
        self._ranges: list[bool] = []

    def add(self, record: Record) -> None:
        """Adds one record's line, or counts why it has none."""
        hidden = self._why_left_out(record)
        if hidden is not None:
            self.left_out[hidden] += 1
            return
        op = OpKind(record["op"])
        if op is OpKind.STEP:
            self._begin_section(record)
        elif op in (OpKind.NODE, OpKind.HOOK, OpKind.NVTX_PUSH):
            self._set_anchor(_anchor_of(record))
        elif op is OpKind.EVENT_RECORD:
            self._name_record(record)
        text, detail, allowance = self._line(op, record)
        self.lines.append(Line(text, record["seq"], self._place, detail, allowance))

    # -- what has no line -------------------------------------------------------------------

    def _why_left_out(self, record: Record) -> Allowance | None:
        op = record["op"]
        if op in (OpKind.STREAM, OpKind.GROUP):
            if op == OpKind.GROUP:
                self._ranks[record["group"]] = record["ranks"]
            return NUMBERS
        if op in (OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE, OpKind.NAME):
            return KERNELS
        if op == OpKind.WEIGHT_VERSION:
            return VERSIONS
        if op == OpKind.NVTX_PUSH:
            self._ranges.append(record["text"].startswith(MFSDP_RANGE))
            return None if self._ranges[-1] else RANGES
        if op == OpKind.NVTX_POP and self._ranges:
            return None if self._ranges.pop() else RANGES
        return None

    # -- where records are ------------------------------------------------------------------

    def _begin_section(self, record: Record) -> None:
        if record["event"] == "begin":
            self._place = f"step {record['step']}"
            self._anchors.clear()
            self._calls.clear()
            # A wait in this step for a record of an earlier one says no more than that.
            self._record_names = dict.fromkeys(self._record_names, "an earlier step")
        self._set_anchor(f"{record['event']} of step")

    def _set_anchor(self, text: str) -> None:
        self._anchors[text] += 1
        self._anchor = f"{text}/{self._anchors[text]}"
        self._records_here.clear()

    def _name_record(self, record: Record) -> None:
        stream = record["stream"]
        self._records_here[stream] += 1
        name = f"record {self._records_here[stream]} {self._role(stream)} after {self._anchor}"
        self._record_names[record["seq"]] = name

    def _role(self, stream: int) -> str:
        return f"@{self._roles[stream]}" if stream in self._roles else "@unused"

    def _group(self, name: str) -> str:
        """Returns a communicator's ranks, with a number when several have the same ones."""
        label = self._groups.get(name)
        if label is None:
            ranks = self._ranks.get(name, [])
            text = "alone" if len(ranks) == 1 else ",".join(map(str, ranks))
            others = sum(known.partition("/")[0] == text for known in self._groups.values())
            label = self._groups[name] = f"{text}/{others + 1}"
        return label

    def _call_number(self, group: str) -> int:
        self._calls[group] += 1
        return self._calls[group]

    # -- lines ------------------------------------------------------------------------------

    def _line(self, op: OpKind, r: Record) -> tuple[str, str | None, Allowance | None]:
        if op is OpKind.COLLECTIVE:
            return self._collective(r)
        if op is OpKind.RESIZE:
            return self._resize(r)
        return self._plain(op, r), None, None

    def _collective(self, r: Record) -> tuple[str, str | None, Allowance | None]:
        group = self._group(r["group"])
        of = "" if r["unit"] is None else f" of {_unit(r['unit'])}"
        how = " async" if r["async"] else ""
        text = (
            f"{r['kind']}{of} {r['dtype']}{how} in {group} #{self._call_number(group)} "
            f"{self._role(r['stream'])}"
        )
        if r["kind"].startswith("all_to_all"):
            return text, f"{r['bytes']} B", ROUTED
        return f"{text} {r['bytes']} B", None, None

    def _resize(self, r: Record) -> tuple[str, str | None, Allowance | None]:
        verb = "release" if r["bytes"] == 0 else "bring back"
        role = self._role(r["stream"])
        sizes = f"{r['was']} to {r['bytes']} B"
        if role == "@all_gather":
            return f"{verb} storage {role} {sizes}", None, None
        return f"{verb} storage {role}", sizes, ACTIVATION

    def _plain(self, op: OpKind, r: Record) -> str:
        match op:
            case OpKind.EVENT_RECORD:
                return f"record {self._role(r['stream'])}"
            case OpKind.EVENT_WAIT:
                return f"{self._role(r['stream'])} waits for {self._awaited(r['record'])}"
            case OpKind.STREAM_WAIT:
                return f"{self._role(r['stream'])} waits for stream {self._role(r['on'])}"
            case OpKind.HOST_SYNC:
                return f"host waits for {self._host_awaited(r)}"
            case OpKind.COLLECTIVE_WAIT:
                return f"{self._role(r['stream'])} joins a call in {self._group(r['group'])}"
            case OpKind.RECORD_STREAM:
                return f"record_stream {self._role(r['stream'])}"
            case OpKind.NODE:
                layer = f" {r['layer']}" if r["layer"] is not None else ""
                return (
                    f"node {r['name']} {r['direction']}{layer} microbatch {r['microbatch']} "
                    f"chunk {r['chunk']} {r['phase']} {self._role(r['stream'])}"
                )
            case OpKind.NODE_END:
                return f"end {r['name']} {r['direction']}"
            case OpKind.HOOK:
                return f"hook {r['point']} {r['module']} of {_unit(r['unit'])}"
            case OpKind.UNSHARD:
                how = "gathers" if r["gathered"] else "has"
                return f"unshard {how} {_unit(r['unit'])} {self._role(r['stream'])}"
            case OpKind.RESHARD:
                return f"reshard {_unit(r['unit'])} {self._role(r['stream'])}"
            case OpKind.REDUCE:
                last = " last" if r["last"] else ""
                filled = f" {r['zero_filled']} zero-filled" if r["zero_filled"] else ""
                return f"reduce {_unit(r['unit'])}{last}{filled} {self._role(r['stream'])}"
            case OpKind.UNIT:
                return (
                    f"unit {_unit(r['unit'])} {r['parameters']} parameters, "
                    f"{r['trainable']} trainable, {r['bytes']} B"
                )
            case OpKind.STEP:
                return f"{r['event']} step {r['step']}"
            case OpKind.GRAD_READ:
                return f"grad_read by {r['by']} {self._role(r['stream'])}"
            case OpKind.NVTX_POP:
                return "pop"
            case OpKind.NVTX_PUSH:
                return f"push {r['text']}"
            case OpKind.FENCE | OpKind.OPTIMIZER_STEP:
                return f"{op} {self._role(r['stream'])}"
            case _:
                return self._any(op, r)

    def _any(self, op: OpKind, r: Record) -> str:
        """Writes a record without a form of its own: all fields but numbers and times."""
        words = [str(op)]
        for name, value in r.items():
            if name == "stream":
                words.append(self._role(value))
            elif name == "unit" and value is not None:
                words.append(f"unit={_unit(value)}")
            elif name not in _NUMBERS:
                words.append(f"{name}={json.dumps(value)}")
        return " ".join(words)

    def _awaited(self, record: int | None) -> str:
        return "nothing" if record is None else self._record_names.get(record, "an earlier step")

    def _host_awaited(self, r: Record) -> str:
        if r["what"] == "device":
            return "the device"
        if r["what"] == "stream":
            return f"stream {self._role(r['on'])}"
        return self._awaited(r["on"])


def _anchor_of(r: Record) -> str:
    if r["op"] == OpKind.NODE:
        layer = f" {r['layer']}" if r["layer"] is not None else ""
        return f"{r['name']} {r['direction']}{layer}"
    if r["op"] == OpKind.HOOK:
        return f"{r['point']} {r['module']}"
    return str(r["text"])


def _unit(name: str) -> str:
    return name or "<root>"
