"""The recorder: numbers records in host order and hands them to a sink."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from real.trace.record import SCHEMA_VERSION, OpKind

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Takes one finished record; the caller does not change it afterwards."""

    def close(self) -> None:
        """Takes no more records. Repeated calls do nothing."""


class MemorySink:
    """Keeps records in a list, for tests and for checks that run in the same process."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Appends `record`."""
        self.records.append(record)

    def close(self) -> None:
        """Does nothing: the list stays readable."""


class Recorder:
    """Numbers what happens on one rank.

    Without a sink it still counts, so a disabled recorder costs one dictionary per call and
    changes no behaviour.

    Attributes:
        unit: The FSDP unit at work right now, or None; collectives are attributed to it.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self.num_records = 0
        self.unit: str | None = None
        self._numbered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_number = 0
        self._models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_models = 0

    @property
    def is_recording(self) -> bool:
        """Whether a record goes anywhere; what only a record needs is not worth computing else."""
        return self._sink is not None

    def header(
        self, *, rank: int, world_size: int, scenario: dict[str, Any], **more: object
    ) -> None:
        """Writes the first record. `scenario` must hold nothing that differs between equal runs.

        Args:
            rank: This rank.
            world_size: Of how many.
            scenario: What is run.
            **more: What else a header may say (`real.trace.record.OPTIONAL_OF`).
        """
        self.record(
            OpKind.HEADER,
            schema=SCHEMA_VERSION,
            rank=rank,
            world_size=world_size,
            scenario=scenario,
            **more,
        )

    def record(self, op: OpKind, **fields: object) -> int:
        """Appends one record and returns its sequence number.

        Args:
            op: The operation.
            **fields: The operation's fields, as listed in `real.trace.record.FIELDS`.
        """
        return self._append(op, fields)

    def _append(self, op: OpKind, fields: dict[str, object]) -> int:
        seq = self.num_records
        self.num_records = seq + 1
        if self._sink is not None:
            self._sink.write({"seq": seq, "op": op, **fields})
        return seq

    def begin_step(self, step: int) -> None:
        """Starts an optimizer step: microbatches are numbered from 0 again."""
        self._numbered.clear()
        self._next_number = 0
        self.record(OpKind.STEP, step=step, event="begin")

    def microbatch_of(self, plan: object) -> int | None:
        """Returns the microbatch of a schedule plan: its number within the step, by first use."""
        if plan is None:
            return None
        number = self._numbered.get(plan)
        if number is None:
            number = self._numbered[plan] = self._next_number
            self._next_number += 1
        return number

    def model_number(self, model: object) -> int:
        """Returns a model's number, by first use; the same as long as the model lives."""
        number = self._models.get(model)
        if number is None:
            number = self._models[model] = self._num_models
            self._num_models += 1
        return number

    def close(self) -> None:
        """Marks the trace complete and closes the sink; a trace without this mark was cut short."""
        self.record(OpKind.END, records=self.num_records)
        if self._sink is not None:
            self._sink.close()
            self._sink = None


_active = Recorder()


def active_recorder() -> Recorder:
    """Returns the recorder of the running rank; one without a sink when nothing is recorded."""
    return _active


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Makes `recorder` the active one for the length of the block."""
    global _active
    previous, _active = _active, recorder
    try:
        yield recorder
    finally:
        _active = previous
