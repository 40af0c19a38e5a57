"""Storage in order: reads after writes, releases after last uses, reuse on the right stream.

Covers I1 (a weight that is read is gathered, and the read is ordered after the gather), the reads
of I8 and I9 (a gradient is read after its reduction, a shard gathered after it was written), I4 (a
release is ordered after the last reader on every stream) and I10 (memory goes back to the pool of
the stream that allocated it only after that stream has joined every user). Two things that torch's
own sanitizer does not see are in it: reuse by the caching allocator without `record_stream`, and
reads after a storage was resized to 0.

[Note: held by the work]
An asynchronous collective keeps its tensors until somebody waits for it. Memory that is freed
before comes back to the allocator at that wait. A resize to 0 asks nobody and releases at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

from real.trace import OpKind, Trace
from real.trace.read import Named, Place, UnitKey, named_of, unit_or_none
from real.trace.recorder import Record
from sim.checks.base import Access, Reporter, Violation
from sim.checks.clocks import CallKey, StreamClocks, call_key
from sim.checks.rules import Judges, named, records_of

_READ_RULES: Final = {"main gradient": "I8", "model weight": "I9"}
"""The rule that a read in no order breaks, where it is not I1: by what the storage holds."""

# Plain strings: the loop sees every record, and comparing an enum costs as much as its work.
_KERNEL, _ALLOCATE, _FREE = (kind.value for kind in (OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE))


class _Storage:
    """What is known of one storage.

    A run makes one for most of its kernels, so all but a few values are the class's until they
    change.

    Attributes:
        stream: The stream that allocated it; None when the trace began with it.
        bytes: Its size.
        name: What it holds, if named.
        read_rule: The rule that a read in no order breaks.
        write: The newest write, as its record, and its stream.
        reads: The newest read of each stream since that write, as records.
        protected: Streams that the allocator was told of (`record_stream`).
        flights: Asynchronous collectives on it that nobody has waited for.
        is_released: Resized to 0 and not brought back.
        is_filled: Written since it was last allocated or brought back.
    """

    name: Named | None = None
    read_rule: str = "I1"
    write: Record | None = None
    write_stream: int = 0
    protected: frozenset[int] = frozenset()
    flights: frozenset[CallKey] = frozenset()
    is_released: bool = False

    def __init__(self, stream: int | None = None, bytes: int = 0, is_filled: bool = True) -> None:
        self.stream = stream
        self.bytes = bytes
        self.is_filled = is_filled
        self.reads: dict[int, Record] = {}

    def users(self) -> dict[int, Record]:
        """The newest access of each stream."""
        newest = dict(self.reads)
        if self.write is not None:
            known = newest.get(self.write_stream)
            if known is None or known["seq"] < self.write["seq"]:
                newest[self.write_stream] = self.write
        return newest


JUDGES: Final = (
    Judges("I1", (records_of(OpKind.KERNEL), named("full weight"))),
    Judges("I4", (records_of(OpKind.KERNEL), records_of(OpKind.RESIZE, OpKind.FREE))),
    Judges("I8", (records_of(OpKind.KERNEL), named("main gradient"))),
    Judges("I9", (records_of(OpKind.KERNEL), named("model weight"))),
    Judges("I10", tuple(map(records_of, (OpKind.KERNEL, OpKind.ALLOCATE, OpKind.FREE)))),
)


def check_storage(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's storages."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


@dataclass
class _FreeBlock:
    """A block in a stream's pool that another stream may still use.

    Attributes:
        number: The storage that had it.
        storage: What was known of it.
        users: Accesses that the pool's stream had not joined when the block came back, by stream.
        seq: Record of the free.
    """

    number: int
    storage: _Storage
    users: dict[int, Record]
    seq: int


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._clocks = StreamClocks()
        self._storages: dict[int, _Storage] = {}
        self._pools: dict[int, list[_FreeBlock]] = {}
        self._held: dict[int, tuple[_Storage, int]] = {}
        self._in_flight: dict[CallKey, list[int]] = {}
        self._reporter = Reporter(trace)
        self._reported: set[tuple[str, int, int | None]] = set()
        self._place = Place()

    def run(self) -> list[Violation]:
        place = self._place
        for record in self._trace.records:
            op = record["op"]
            if op == _KERNEL:
                self._accesses(record, record["stream"])
            elif op == _ALLOCATE:
                self._allocate(record)
            elif op == _FREE:
                self._free(record)
            else:
                place.enter(record)
                if op == OpKind.COLLECTIVE:
                    self._collective(record)
                elif op == OpKind.COLLECTIVE_WAIT:
                    self._wait(record)
                elif op == OpKind.NAME:
                    self._name(record)
                elif op == OpKind.RESIZE:
                    self._resize(record)
                elif op == OpKind.RECORD_STREAM:
                    self._storage(record["storage"]).protected |= {record["stream"]}
                if op != OpKind.COLLECTIVE_WAIT:
                    self._clocks.advance(record)
                place.leave(record)
        return self._reporter.found

    def _storage(self, number: int) -> _Storage:
        storage = self._storages.get(number)
        if storage is None:
            storage = self._storages[number] = _Storage()
        return storage

    def _name(self, record: Record) -> None:
        storage = self._storage(record["storage"])
        storage.name = named_of(record)
        storage.read_rule = _READ_RULES.get(storage.name.kind, "I1")

    # -- uses -------------------------------------------------------------------------------

    def _accesses(self, record: Record, stream: int) -> None:
        storages = self._storages
        is_ordered = self._clocks.is_ordered_after
        for number in record["reads"]:
            storage = storages.get(number)
            if storage is None:
                storage = storages[number] = _Storage()
            if storage.is_released:
                self._report_use_after_release(storage, number, record, stream)
            elif not storage.is_filled and storage.name is not None:
                self._report_empty(storage, number, record, stream)
            write = storage.write
            if write is not None and storage.write_stream != stream:
                if not is_ordered(stream, storage.write_stream, write["seq"]):
                    self._report_race(
                        "I8" if _is_reduction(write) else storage.read_rule,
                        storage,
                        number,
                        (write, storage.write_stream),
                        (record, stream),
                    )
            storage.reads[stream] = record
        for number in record["writes"]:
            storage = storages.get(number)
            if storage is None:
                storage = storages[number] = _Storage()
            if storage.is_released:
                self._report_use_after_release(storage, number, record, stream)
            write = storage.write
            if write is not None and storage.write_stream != stream:
                if not is_ordered(stream, storage.write_stream, write["seq"]):
                    earlier = (write, storage.write_stream)
                    self._report_race("I4", storage, number, earlier, (record, stream))
            if storage.reads:
                for reader, read in storage.reads.items():
                    if reader != stream and not is_ordered(stream, reader, read["seq"]):
                        self._report_race("I4", storage, number, (read, reader), (record, stream))
                storage.reads = {}
            storage.write, storage.write_stream, storage.is_filled = record, stream, True

    def _collective(self, record: Record) -> None:
        self._accesses(record, self._clocks.stream_of(record))
        if record["async"]:  # [Note: held by the work]
            key = call_key(record)
            numbers = list(dict.fromkeys((*record["reads"], *record["writes"])))
            self._in_flight[key] = numbers
            for number in numbers:
                self._storage(number).flights |= {key}

    def _wait(self, record: Record) -> None:
        self._clocks.advance(record)
        key = call_key(record)
        for number in self._in_flight.pop(key, ()):
            storage = self._storages.get(number)
            if storage is not None:
                storage.flights -= {key}
            held = self._held.get(number)
            if held is not None:
                held[0].flights -= {key}
                if not held[0].flights:
                    del self._held[number]
                    self._give_back(number, *held)

    # -- memory -----------------------------------------------------------------------------

    def _resize(self, record: Record) -> None:
        number = record["storage"]
        storage = self._storage(number)
        stream = record["stream"]
        if record["bytes"] == 0:
            for user_stream, user in storage.users().items():
                if user_stream in storage.protected:
                    continue  # the allocator holds the block back until that stream is done
                if not self._clocks.is_ordered_after(stream, user_stream, user["seq"]):
                    self._report(
                        "I4",
                        storage,
                        number,
                        f"{_what(storage, number)} is released before its last use",
                        first=self._access(number, user, user_stream),
                        second=self._reporter.access(record["seq"], stream, "release"),
                        missing=self._missing(stream, user_stream, user),
                    )
            if storage.stream != stream:
                self._give_back(number, storage, record["seq"])
            storage.is_released = True
        elif record["was"] == 0:
            self._reuse(stream, record["bytes"], record["seq"])
            storage.is_released, storage.is_filled = False, False
            storage.stream, storage.bytes = stream, record["bytes"]
            storage.protected = frozenset()
            storage.write, storage.reads = None, {}

    def _allocate(self, record: Record) -> None:
        stream = record["stream"]
        if stream in self._pools:
            self._reuse(stream, record["bytes"], record["seq"])
        self._storages[record["storage"]] = _Storage(stream, record["bytes"], is_filled=False)

    def _free(self, record: Record) -> None:
        number = record["storage"]
        storage = self._storages.pop(number, None)
        if storage is None or storage.is_released:
            return
        if storage.flights:
            self._held[number] = (storage, record["seq"])
        else:
            self._give_back(number, storage, record["seq"])

    def _give_back(self, number: int, storage: _Storage, seq: int) -> None:
        """Puts a block into its stream's pool, with the users that the stream has not joined."""
        pool = storage.stream
        if pool is None:
            return
        if storage.write is None or storage.write_stream == pool:
            for stream in storage.reads:
                if stream != pool:
                    break
            else:
                return  # nobody but its own stream has it: most blocks
        users = {
            stream: user
            for stream, user in storage.users().items()
            if stream not in storage.protected
            and not self._clocks.is_ordered_after(pool, stream, user["seq"])
        }
        if users:
            block = _FreeBlock(number, copy(storage), users, seq)
            self._pools.setdefault(pool, []).append(block)

    def _reuse(self, stream: int, num_bytes: int, seq: int) -> None:
        """Judges a new allocation: it may get any free block of the stream that is large enough.

        What the stream does with the block starts after all that it has waited for by now.
        """
        waiting = []
        for block in self._pools.get(stream, []):
            block.users = {
                user_stream: user
                for user_stream, user in block.users.items()
                if not self._clocks.is_ordered_after(stream, user_stream, user["seq"])
            }
            if not block.users:
                continue
            if block.storage.bytes < num_bytes:
                waiting.append(block)
                continue
            user_stream, user = next(iter(block.users.items()))
            self._report(
                "I10",
                block.storage,
                block.number,
                f"{_what(block.storage, block.number)} went back to the pool of "
                f"{self._reporter.stream(stream)} in record {block.seq} and may be given out again "
                f"while {self._label(user_stream)} uses it",
                first=self._access(block.number, user, user_stream),
                second=self._reporter.access(seq, stream, "allocation"),
                missing=f"{self._missing(stream, user_stream, user)}, and record_stream was not "
                "called",
            )
        if waiting:
            self._pools[stream] = waiting
        else:
            self._pools.pop(stream, None)

    # -- reports ----------------------------------------------------------------------------

    def _report_use_after_release(
        self, storage: _Storage, number: int, record: Record, stream: int
    ) -> None:
        self._report(
            "I1",
            storage,
            number,
            f"{_what(storage, number)} is used after its memory was released",
            second=self._access(number, record, stream),
        )

    def _report_empty(self, storage: _Storage, number: int, record: Record, stream: int) -> None:
        self._report(
            "I1",
            storage,
            number,
            f"{_what(storage, number)} is read before anything was written to it",
            second=self._access(number, record, stream),
        )

    def _report_race(
        self,
        rule: str,
        storage: _Storage,
        number: int,
        earlier: tuple[Record, int],
        later: tuple[Record, int],
    ) -> None:
        self._report(
            rule,
            storage,
            number,
            f"{_what(storage, number)} is used by two streams in no order",
            first=self._access(number, *earlier),
            second=self._access(number, *later),
            missing=self._missing(later[1], earlier[1], earlier[0]),
            unit=_unit_of(earlier[0]) or _unit_of(later[0]),
        )

    def _access(self, number: int, record: Record, stream: int) -> Access:
        verb = "writes" if number in record["writes"] else "reads"
        return self._reporter.access(
            record["seq"], stream, f"{_call(record)} {verb}", self._label(stream)
        )

    def _label(self, stream: int) -> str:
        group = self._clocks.communicator(stream)
        return self._reporter.stream(stream) if group is None else f"the stream of group {group}"

    def _missing(self, stream: int, other: int, record: Record) -> str:
        if other < 0:
            return (
                f"{self._label(stream)} never waits for the work of {_call(record)}, issued in "
                f"record {record['seq']}"
            )
        return (
            f"{self._label(stream)} never waits for {_call(record)} on {self._label(other)} in "
            f"record {record['seq']}"
        )

    def _report(
        self,
        rule: str,
        storage: _Storage,
        number: int,
        message: str,
        *,
        first: Access | None = None,
        second: Access,
        missing: str | None = None,
        unit: UnitKey | None = None,
    ) -> None:
        key = (rule, number, self._place.microbatch)
        if key in self._reported:
            return  # one report a storage and microbatch: the rest follows from it
        self._reported.add(key)
        self._reporter.report(
            rule,
            f"{message}.",
            unit=unit if storage.name is None else storage.name.unit,
            first=first,
            second=second,
            missing=missing,
        )


def _is_reduction(record: Record) -> bool:
    return (
        record["op"] == OpKind.COLLECTIVE
        and record["kind"] in ("reduce_scatter", "all_reduce")
        and record["unit"] is not None
    )


def _unit_of(record: Record) -> UnitKey | None:
    return unit_or_none(record) if record["op"] == OpKind.COLLECTIVE else None


def _call(record: Record) -> str:
    if record["op"] != OpKind.COLLECTIVE:
        return str(record["name"])
    unit = unit_or_none(record)
    of = f" of {unit}" if unit is not None else ""
    return f"{record['kind']}{of}"


def _what(storage: _Storage, number: int) -> str:
    if storage.name is None:
        return f"Storage {number}"
    return f"The {storage.name.kind} of unit {storage.name.unit}"
