"""Where the records of ranks go, and the traces that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from real.config import Scenario, ScenarioError
from real.trace import JsonlSink, Recorder, Sink, Trace, trace_of, trace_path
from real.trace.recorder import Record


def open_sinks(out: Path | None, world_size: int) -> list[Sink | None]:
    """Opens one trace file per rank, after removing an older trace in the same folder.

    Raises:
        ScenarioError: The folder cannot be written.
    """
    if out is None:
        return [None] * world_size
    try:
        clear_folder(out)
        return [JsonlSink(trace_path(out, rank)) for rank in range(world_size)]
    except OSError as error:
        raise ScenarioError(
            f"Expected a folder to write to, got {out}: {error.strerror}."
        ) from None


def clear_folder(out: Path) -> None:
    """Makes a folder, and removes the traces in it."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("rank*.jsonl"):
        old.unlink()


class KeepingSink:
    """Keeps records for the checks, on their way to another sink.

    Attributes:
        records: All so far, the header first.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Takes one record."""
        self.records.append(record)
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        """Closes the other sink."""
        if self._sink is not None:
            self._sink.close()


def keeping(sinks: Sequence[Sink | None], world_size: int) -> list[KeepingSink]:
    """Returns a sink a rank that keeps what it passes on; without sinks it only keeps."""
    return [KeepingSink(sink) for sink in sinks or [None] * world_size]


class _Kept(Protocol):
    @property
    def records(self) -> list[Record]: ...


def traces_of(sinks: Iterable[_Kept], *, why_incomplete: str | None = None) -> list[Trace]:
    """Returns the traces that ranks have left in sinks.

    Args:
        sinks: One a rank.
        why_incomplete: What kept the run from its end, empty where nothing did; None asks each
            trace for its last record.
    """
    return [trace_of(sink.records, why_incomplete=why_incomplete) for sink in sinks]


def begin_trace(
    sink: Sink | None, rank: int, world_size: int, scenario: Scenario | None
) -> Recorder:
    """Returns a rank's recorder, its header written.

    Args:
        sink: Where its records go; None counts them only.
        rank: The rank.
        world_size: Number of ranks.
        scenario: What the header says is run, or None for what is no scenario.
    """
    recorder = Recorder(sink)
    recorder.header(
        rank=rank,
        world_size=world_size,
        scenario={} if scenario is None else scenario.as_dict(),
    )
    return recorder
