"""Traces on disk: one JSON Lines file per rank, readable after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from real.trace.record import (
    OPTIONAL_OF,
    READABLE_VERSIONS,
    SCHEMA_VERSION,
    OpKind,
    TraceError,
    upgraded,
    validate_record,
)
from real.trace.recorder import Record

_FLUSH_EVERY = 256
_BULK = frozenset({OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE})
LOOPBACK: Final = "loopback"
"""The peers of a rank that was run alone."""

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")


def _make_encode() -> Callable[[Record], str]:
    """Returns what turns a record into one line of text.

    `JSONEncoder.encode` makes a new encoder for each call, which takes longer than to encode.
    """
    plain = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)
    encoder: Any = json.encoder
    make = encoder.c_make_encoder
    if make is None:  # a Python without the C module
        return plain.encode
    escape = encoder.encode_basestring_ascii
    chunks = make(None, plain.default, escape, None, ":", ",", False, False, True)
    return lambda record: "".join(chunks(record, 0))


_encode = _make_encode()


def trace_path(folder: Path, rank: int) -> Path:
    """Returns the file of one rank in a trace folder."""
    return folder / f"rank{rank:04d}.jsonl"


class JsonlSink:
    """Appends records to a file and flushes often, so that a kill costs the last few lines only."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii", newline="\n")
        self._pending = _FLUSH_EVERY  # the header reaches the disk at once: it names the rank

    def write(self, record: Record) -> None:
        """Writes one line."""
        self._file.write(_encode(record) + "\n")
        self._pending += 1
        if self._pending >= _FLUSH_EVERY:
            self._file.flush()
            self._pending = 0

    def close(self) -> None:
        """Closes the file. Repeated calls do nothing."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's records.

    Attributes:
        scenario: What was to be run.
        records: All records after the header, in host order.
        is_complete: False when the run was cut short.
        why_incomplete: What shows that it was cut short.
        header: What else the header says: target, megatron, tree, peers and bounds, if known.
    """

    rank: int
    world_size: int
    scenario: dict[str, Any]
    records: list[Record]
    is_complete: bool
    why_incomplete: str = ""
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def peers(self) -> str | None:
        """What stood for the other ranks, or None where they were there."""
        return self.header.get("peers")

    @cached_property
    def lean_records(self) -> list[Record]:
        """The records but for kernels, allocations and frees, which are most of them."""
        return [record for record in self.records if record["op"] not in _BULK]


def trace_of(records: Sequence[Record], *, why_incomplete: str | None = None) -> Trace:
    """Returns what a header and the records after it say of one rank.

    Args:
        records: The header, then all others in host order.
        why_incomplete: What shows that the run was cut short, empty where it was not; None asks the
            last record.
    """
    header, *others = records
    why = _why_incomplete(others) if why_incomplete is None else why_incomplete
    return Trace(
        rank=header["rank"],
        world_size=header["world_size"],
        scenario=header["scenario"],
        records=others,
        is_complete=not why,
        why_incomplete=why,
        header={name: header[name] for name in OPTIONAL_OF[OpKind.HEADER] if name in header},
    )


def read_trace(path: Path) -> Trace:
    """Reads and validates one rank's file.

    A last line without its newline is the mark of a killed run: it is dropped and the trace is
    returned as incomplete. Anything else that does not fit is an error.

    Raises:
        TraceError: The file is missing, empty, corrupted or of another schema version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace: {error.strerror}.") from None
    was_cut = bool(lines.pop())
    records: list[Record] = []
    version = SCHEMA_VERSION
    for number, line in enumerate(lines, start=1):
        record = _decode(path, number, line)
        if number == 1:
            version = _version_of(path, record)
        records.append(_validated(path, number, upgraded(record, version)))
    if not records:
        raise TraceError(f"{path}:1: expected a header record, got none.")
    rank, world_size = records[0]["rank"], records[0]["world_size"]
    if rank >= world_size:
        raise TraceError(f"{path}:1: expected a rank below {world_size}, got {rank}.")
    return trace_of(records, why_incomplete="half a line at the end" if was_cut else None)


def _why_incomplete(records: list[Record]) -> str:
    """Returns what shows that the run was cut short, or nothing."""
    if not records or records[-1]["op"] != OpKind.END:
        return "no end record"
    end = records[-1]
    if end["records"] != end["seq"]:
        return f"the end counts {end['records']} records before it, not {end['seq']}"
    if any(record["op"] == OpKind.END for record in records[:-1]):
        return "an end record that is not the last"
    return ""


def _decode(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{number}: expected one JSON object, got {line[:40]!r}.")
    return record


def _version_of(path: Path, header: Record) -> int:
    """Returns the schema of a file's records, of which the header is the first."""
    if header.get("op") != OpKind.HEADER:
        raise TraceError(f"{path}:1: expected a header record, got none.")
    version = header.get("schema")
    if type(version) is not int or version not in READABLE_VERSIONS:
        known = " or ".join(map(str, READABLE_VERSIONS))
        raise TraceError(f"{path}:1: expected trace schema {known}, got {version!r}.")
    return version


def _validated(path: Path, number: int, record: Record) -> Record:
    try:
        validate_record(record)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if record["op"] == OpKind.HEADER and number > 1:
        raise TraceError(f"{path}:{number}: expected one header record, got another one.")
    if record["seq"] != number - 1:
        raise TraceError(f"{path}:{number}: expected seq {number - 1}, got {record['seq']}.")
    return record


def why_not_whole(traces: Sequence[Trace]) -> list[str]:
    """Returns why traces are not those of one whole run, one sentence each; empty when they are."""
    reasons = [
        f"cut short on rank {trace.rank}: {trace.why_incomplete or 'no end record'}"
        for trace in traces
        if not trace.is_complete
    ]
    for trace in traces:
        if all(record["op"] == OpKind.END for record in trace.records):
            reasons.append(f"nothing recorded on rank {trace.rank} but its header")
    for trace in traces[1:]:
        reasons += _disagreements(traces[0], trace)
    return reasons


def _disagreements(first: Trace, other: Trace) -> Iterator[str]:
    """Yields in what the headers of two ranks differ, of what all ranks must have alike."""
    mine = {**first.scenario, "world_size": first.world_size, **first.header}
    theirs = {**other.scenario, "world_size": other.world_size, **other.header}
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            yield (
                f"rank {other.rank} is of another run: {name} is {theirs.get(name)!r} and "
                f"{mine.get(name)!r} on rank {first.rank}"
            )
            return


def read_traces(folder: Path) -> list[Trace]:
    """Reads every rank of a trace folder, in rank order.

    Where the other ranks were not there, any of them may be missing.

    Raises:
        TraceError: The folder holds no trace, a rank is missing, or a file cannot be read.
    """
    paths = sorted(p for p in folder.glob("rank*.jsonl") if _RANK_FILE.fullmatch(p.name))
    if not paths:
        raise TraceError(f"{folder}: expected rank*.jsonl files, got none.")
    traces = [read_trace(path) for path in paths]
    world_size = traces[0].world_size
    ranks = [trace.rank for trace in traces]
    is_partial = all(trace.peers == LOOPBACK for trace in traces)
    is_whole = len(ranks) == world_size and ranks == list(range(world_size))
    if not is_partial and not is_whole:
        raise TraceError(f"{folder}: expected the ranks 0 to {world_size - 1}, got {ranks}.")
    return traces
