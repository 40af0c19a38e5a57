"""Keeps the newest records of a rank, to say where it stands when it goes no further."""

from __future__ import annotations

from collections import deque

from real.trace.record import OpKind
from real.trace.recorder import Record, Sink


class RecentSink:
    """Keeps the newest records, on their way to another sink if there is one.

    Another thread may read while records are written.

    Args:
        size: How many records to keep.
        sink: Also gets every record, or None.
    """

    def __init__(self, size: int = 64, sink: Sink | None = None) -> None:
        self._records: deque[Record] = deque(maxlen=size)
        self._newest: dict[str, Record] = {}
        self._sink = sink

    def write(self, record: Record) -> None:
        """Takes one record; the oldest goes."""
        self._records.append(record)
        self._newest[record["op"]] = record
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        """Closes the other sink; the records stay readable."""
        if self._sink is not None:
            self._sink.close()

    def newest(self, op: OpKind) -> Record | None:
        """Returns the newest record of an operation, however long ago, or None."""
        return self._newest.get(op.value)

    def lines(self) -> list[str]:
        """Returns the kept records as text, oldest first."""
        return [record_text(record) for record in self._records.copy()]


def record_text(record: Record) -> str:
    """Returns a record as one line, without what only says which memory it touched."""
    fields = " ".join(
        f"{name}={value}"
        for name, value in record.items()
        if name not in ("seq", "op", "reads", "writes", "scenario") and value is not None
    )
    return f"#{record['seq']} {record['op']} {fields}".rstrip()
