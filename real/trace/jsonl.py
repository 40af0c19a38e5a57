"""Traces on disk: one JSON Lines file per rank, readable after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from real.trace.record import SCHEMA_VERSION, OpKind, TraceError, validate_record
from real.trace.recorder import Record

_FLUSH_EVERY = 256
_BULK = frozenset({OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE})
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
        records: All records after the header, in host order.
        is_complete: False when the run was cut short (no end record).
        peers: What stood for the other ranks, or None where they were there.
    """

    rank: int
    world_size: int
    scenario: dict[str, Any]
    records: list[Record]
    is_complete: bool
    peers: str | None = None

    @cached_property
    def lean_records(self) -> list[Record]:
        """The records but for kernels, allocations and frees, which are most of them."""
        return [record for record in self.records if record["op"] not in _BULK]


def trace_of(records: Sequence[Record], *, is_complete: bool | None = None) -> Trace:
    """Returns what a header and the records after it say of one rank.

    Args:
        records: The header, then all others in host order.
        is_complete: Whether the run came to its end; None asks the last record.
    """
    header, *others = records
    if is_complete is None:
        is_complete = bool(others) and others[-1]["op"] == OpKind.END
    return Trace(
        rank=header["rank"],
        world_size=header["world_size"],
        scenario=header["scenario"],
        records=others,
        is_complete=is_complete,
        peers=header.get("peers"),
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
    records = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    if not records or records[0]["op"] != OpKind.HEADER:
        raise TraceError(f"{path}:1: expected a header record, got none.")
    return trace_of(records, is_complete=False if was_cut else None)


def _decode(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        raise TraceError(f"{path}:{number}: expected one JSON object, got {line[:40]!r}.") from None
    if isinstance(record, dict) and record.get("op") == OpKind.HEADER:
        version = record.get("schema")
        if version != SCHEMA_VERSION:
            raise TraceError(
                f"{path}:{number}: expected trace schema {SCHEMA_VERSION}, got {version!r}."
            )
    try:
        validate_record(record)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if record["seq"] != number - 1:
        raise TraceError(f"{path}:{number}: expected seq {number - 1}, got {record['seq']}.")
    assert isinstance(record, dict)
    return record


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
    is_partial = all(trace.peers == "loopback" for trace in traces)
    if not is_partial and ranks != list(range(world_size)):
        raise TraceError(f"{folder}: expected the ranks 0 to {world_size - 1}, got {ranks}.")
    return traces
