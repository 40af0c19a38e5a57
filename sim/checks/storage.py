"""Storage in order: reads after writes, releases after last uses, reuse on the right stream.

Covers I1 (a weight that is read is gathered, and the read is ordered after the gather), I4 (a
release is ordered after the last reader on every stream) and I10 (memory goes back to the pool of
the stream that allocated it only after that stream has joined every user). Two things that torch's
own sanitizer does not see are in it: reuse by the caching allocator without `record_stream`, and
reads after a storage was resized to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.checks.base import Access, Place, Violation, unit_label, walk
from sim.checks.clocks import StreamClocks


@dataclass
class _Storage:
    """What is known of one storage.

    Attributes:
        stream: The stream that allocated it; None when the trace began with it.
        bytes: Its size.
        name: What it holds, if named.
        write: The newest write.
        reads: The newest read of each stream since that write.
        protected: Streams that the allocator was told of (`record_stream`).
        is_released: Resized to 0 and not brought back.
        is_filled: Written since it was last allocated or brought back.
    """

    stream: int | None = None
    bytes: int = 0
    name: str | None = None
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    protected: set[int] = field(default_factory=set)
    is_released: bool = False
    is_filled: bool = True

    def users(self) -> list[Access]:
        """The newest access of each stream."""
        newest = dict(self.reads)
        if self.write is not None:
            known = newest.get(self.write.stream)
            if known is None or known.seq < self.write.seq:
                newest[self.write.stream] = self.write
        return list(newest.values())


def check_storage(traces: Sequence[Trace]) -> list[Violation]:
    """Checks every rank's storages."""
    return [violation for trace in traces for violation in _Checker(trace).run()]


@dataclass
class _FreeBlock:
    """A block in a stream's pool that another stream may still use.

    Attributes:
        number: The storage that had it.
        storage: What was known of it.
        users: Accesses that the pool's stream had not joined when the block came back.
        seq: Record of the free.
    """

    number: int
    storage: _Storage
    users: list[Access]
    seq: int


class _Checker:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._clocks = StreamClocks()
        self._storages: dict[int, _Storage] = {}
        self._pools: dict[int, list[_FreeBlock]] = {}
        self._found: list[Violation] = []
        self._reported: set[tuple[str, int, int | None]] = set()

    def run(self) -> list[Violation]:
        for record, place in walk(self._trace):
            op = record["op"]
            if op == OpKind.KERNEL:
                self._accesses(record, record["name"], place)
            elif op == OpKind.COLLECTIVE:
                self._accesses(record, record["kind"], place)
            elif op == OpKind.ALLOCATE:
                self._allocate(record, place)
            elif op == OpKind.NAME:
                self._storage(record["storage"]).name = record["name"]
            elif op == OpKind.RESIZE:
                self._resize(record, place)
            elif op == OpKind.RECORD_STREAM:
                self._storage(record["storage"]).protected.add(record["stream"])
            elif op == OpKind.FREE:
                self._free(record)
            self._clocks.advance(record)
        return self._found

    def _storage(self, number: int) -> _Storage:
        storage = self._storages.get(number)
        if storage is None:
            storage = self._storages[number] = _Storage()
        return storage

    def _accesses(self, record: Record, name: str, place: Place) -> None:
        seq, stream = record["seq"], record["stream"]
        for number in record["reads"]:
            storage = self._storage(number)
            access = Access(seq, stream, f"{name} reads")
            self._live(storage, number, access, place)
            if storage.name is not None and not storage.is_filled and not storage.is_released:
                self._report(
                    "I1",
                    number,
                    f"{_what(storage, number)} is read before anything was written to it",
                    place,
                    second=access,
                    unit=storage.name,
                )
            if storage.write is not None:
                self._ordered("I1", storage, number, storage.write, access, place)
            storage.reads[stream] = access
        for number in record["writes"]:
            storage = self._storage(number)
            access = Access(seq, stream, f"{name} writes")
            self._live(storage, number, access, place)
            for earlier in storage.users():
                self._ordered("I4", storage, number, earlier, access, place)
            storage.write, storage.reads, storage.is_filled = access, {}, True

    def _live(self, storage: _Storage, number: int, access: Access, place: Place) -> None:
        if storage.is_released:
            self._report(
                "I1",
                number,
                f"{_what(storage, number)} is used after its memory was released",
                place,
                second=access,
                unit=storage.name,
            )

    def _ordered(
        self,
        rule: str,
        storage: _Storage,
        number: int,
        earlier: Access,
        later: Access,
        place: Place,
    ) -> None:
        if self._clocks.is_ordered_after(later.stream, earlier.stream, earlier.seq):
            return
        self._report(
            rule,
            number,
            f"{_what(storage, number)} is used by two streams in no order",
            place,
            first=earlier,
            second=later,
            missing=f"stream {later.stream} never waits for stream {earlier.stream} "
            f"after record {earlier.seq}",
            unit=storage.name,
        )

    def _resize(self, record: Record, place: Place) -> None:
        storage = self._storage(record["storage"])
        stream = record["stream"]
        if record["bytes"] == 0:
            for user in storage.users():
                if user.stream in storage.protected:
                    continue  # the allocator holds the block back until that stream is done
                if not self._clocks.is_ordered_after(stream, user.stream, user.seq):
                    self._report(
                        "I4",
                        record["storage"],
                        f"{_what(storage, record['storage'])} is released before its last use",
                        place,
                        first=user,
                        second=Access(record["seq"], stream, "release"),
                        missing=f"stream {stream} never waits for stream {user.stream} after "
                        f"record {user.seq}",
                        unit=storage.name,
                    )
            if storage.stream != stream:
                self._give_back(record["storage"], storage, record["seq"])
            storage.is_released = True
        elif record["was"] == 0:
            self._reuse(stream, record["bytes"], record["seq"], place)
            storage.is_released, storage.is_filled = False, False
            storage.stream, storage.bytes = stream, record["bytes"]
            storage.protected.clear()
            storage.write, storage.reads = None, {}

    def _allocate(self, record: Record, place: Place) -> None:
        stream = record["stream"]
        self._reuse(stream, record["bytes"], record["seq"], place)
        self._storages[record["storage"]] = _Storage(
            stream=stream, bytes=record["bytes"], is_filled=False
        )

    def _free(self, record: Record) -> None:
        storage = self._storages.pop(record["storage"], None)
        if storage is not None and not storage.is_released:
            self._give_back(record["storage"], storage, record["seq"])

    def _give_back(self, number: int, storage: _Storage, seq: int) -> None:
        """Puts a block into its stream's pool, with the users that the stream has not joined."""
        if storage.stream is None:
            return
        users = [
            user
            for user in storage.users()
            if user.stream not in storage.protected
            and not self._clocks.is_ordered_after(storage.stream, user.stream, user.seq)
        ]
        if users:
            block = _FreeBlock(number, replace(storage), users, seq)
            self._pools.setdefault(storage.stream, []).append(block)

    def _reuse(self, stream: int, num_bytes: int, seq: int, place: Place) -> None:
        """Judges a new allocation: it may get any free block of the stream that is large enough.

        What the stream does with the block starts after all that it has waited for by now.
        """
        waiting = []
        for block in self._pools.get(stream, []):
            block.users = [
                user
                for user in block.users
                if not self._clocks.is_ordered_after(stream, user.stream, user.seq)
            ]
            if not block.users:
                continue
            if block.storage.bytes < num_bytes:
                waiting.append(block)
                continue
            user = block.users[0]
            self._report(
                "I10",
                block.number,
                f"{_what(block.storage, block.number)} went back to the pool of stream {stream} in "
                f"record {block.seq} and may be given out again while stream {user.stream} uses it",
                place,
                first=user,
                second=Access(seq, stream, "allocation"),
                missing=f"stream {stream} never waits for stream {user.stream} after record "
                f"{user.seq}, and record_stream was not called",
                unit=block.storage.name,
            )
        self._pools[stream] = waiting

    def _report(
        self,
        rule: str,
        number: int,
        message: str,
        place: Place,
        *,
        unit: str | None,
        first: Access | None = None,
        second: Access | None = None,
        missing: str | None = None,
    ) -> None:
        key = (rule, number, place.microbatch)
        if key in self._reported:
            return  # one report a storage and microbatch: the rest follows from it
        self._reported.add(key)
        self._found.append(
            Violation(
                rule=rule,
                rank=self._trace.rank,
                message=f"{message}.",
                unit=None if unit is None else unit_label(unit.partition(":")[0]),
                node=place.node,
                microbatch=place.microbatch,
                first=first,
                second=second,
                missing=missing,
                hook=place.hook,
                seq=None if second is None else second.seq,
            )
        )


def _what(storage: _Storage, number: int) -> str:
    if storage.name is None:
        return f"Storage {number}"
    unit, _, kind = storage.name.partition(":")
    return f"The {kind} of unit {unit_label(unit)}"
