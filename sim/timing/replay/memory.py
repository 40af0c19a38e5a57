"""Device memory over a step, as torch's caching allocator would hand it out.

The allocator keeps a pool of free blocks for each stream, rounds sizes up, splits large blocks and
joins free neighbours. A block that another stream was recorded on comes back only when that stream
is done with what it had been given by the time of the free; that is where time meets memory.

What existed before recording began has no record of its allocation and is not counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Final

from real.trace import Trace
from real.trace.recorder import Record
from sim.timing.replay.timeline import Replay

_MIB: Final = 1 << 20
_ROUND: Final = 512
_SMALL: Final = _MIB
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_MIN_LARGE: Final = 10 * _MIB
_ROUND_LARGE: Final = 2 * _MIB


@dataclass(kw_only=True, slots=True)
class Block:
    """Part of a segment of device memory.

    Attributes:
        size: Bytes.
        pool: Stream, and whether it is of the small pool.
        is_free: Whether it can be given out.
        before: The neighbour at a lower address, if in the same segment.
        after: The neighbour at a higher address, if in the same segment.
        number: Order of creation; makes the choice among equal sizes certain.
    """

    size: int
    pool: tuple[int, bool]
    number: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Per-stream pools over segments that only grow.

    Attributes:
        allocated: Bytes in blocks that are given out or not yet back.
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}
        self._num_blocks = 0

    def allocate(self, stream: int, num_bytes: int) -> Block:
        """Gives out the smallest free block that is large enough, or one of a new segment."""
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        pool = (stream, size <= _SMALL)
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._grow(pool, size)
        self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Puts a block back and joins it with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[block.pool].remove((other.size, other.number, other))
                self._join(block, other)
        block.is_free = True
        insort(self._free[block.pool], (block.size, block.number, block))

    def _grow(self, pool: tuple[int, bool], size: int) -> Block:
        if pool[1]:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        self.reserved += segment
        return self._new(segment, pool)

    def _new(self, size: int, pool: tuple[int, bool]) -> Block:
        self._num_blocks += 1
        return Block(size=size, pool=pool, number=self._num_blocks)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < (_ROUND if block.pool[1] else _SMALL + 1):
            return
        other = self._new(rest, block.pool)
        other.is_free, other.before, other.after = True, block, block.after
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        insort(self._free[block.pool], (other.size, other.number, other))

    @staticmethod
    def _join(block: Block, other: Block) -> None:
        block.size += other.size
        if other is block.before:
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Memory of one rank over a step.

    Attributes:
        points: Time, bytes allocated, bytes reserved and bytes of gathered parameters, at changes.
        peak_bytes: Most bytes allocated at once during the step.
        peak_reserved_bytes: Most bytes of device memory taken.
        peak_gathered_bytes: Most bytes of gathered full-size parameters at once.
        peak_ns: When the most bytes were allocated.
    """

    points: list[tuple[int, int, int, int]]
    peak_bytes: int
    peak_reserved_bytes: int
    peak_gathered_bytes: int
    peak_ns: int


def memory_timeline(replay: Replay, rank: int) -> MemoryTimeline:
    """Returns what one rank's device memory does over the replayed step."""
    return _Memory(replay, rank).run()


@dataclass(kw_only=True, slots=True)
class _Held:
    """A storage that has a block.

    Attributes:
        block: Its block.
        users: Streams beside its own that the allocator was told of.
        is_gathered: Whether it holds a unit's full-size parameters.
    """

    block: Block
    users: set[int] = field(default_factory=set)
    is_gathered: bool = False


class _Memory:
    def __init__(self, replay: Replay, rank: int) -> None:
        self._replay = replay
        self._rank = rank
        self._allocator = CachingAllocator()
        self._held: dict[int, _Held] = {}
        self._full_weights = {
            storage
            for record in replay.traces[rank].records
            if record["op"] == "collective"
            and record["kind"] == "all_gather"
            and record["unit"] is not None
            for storage in record["writes"]
        }
        self._gathered = 0
        self._late: list[tuple[int, int, Block]] = []
        self._num_late = 0
        self._ends = _ends_by_stream(replay, rank)
        self._points: list[tuple[int, int, int, int]] = []

    def run(self) -> MemoryTimeline:
        trace = self._replay.traces[self._rank]
        first = self._replay.records[self._rank]
        for record in _before(trace, first[0]["seq"] if first else 0):
            self._take(record, 0)
        self._points = []
        self._note(0)
        for record, now in self._replay.host_times(self._rank):
            if self._take(record, now):
                self._note(now)
        peak = max(self._points, key=lambda point: point[1])
        return MemoryTimeline(
            points=self._points,
            peak_bytes=peak[1],
            peak_reserved_bytes=max(point[2] for point in self._points),
            peak_gathered_bytes=max(point[3] for point in self._points),
            peak_ns=peak[0],
        )

    def _note(self, now: int) -> None:
        allocator = self._allocator
        self._points.append((now, allocator.allocated, allocator.reserved, self._gathered))

    def _take(self, record: Record, now: int) -> bool:
        """Returns whether memory changed."""
        op = record["op"]
        if op == "allocate":
            self._allocate(record["storage"], record["stream"], record["bytes"], now)
        elif op == "resize":
            self._release(record["storage"], record["seq"], now)
            if record["bytes"]:
                self._allocate(record["storage"], record["stream"], record["bytes"], now)
        elif op == "free":
            self._release(record["storage"], record["seq"], now)
        elif op == "record_stream" and record["storage"] in self._held:
            self._held[record["storage"]].users.add(record["stream"])
            return False
        else:
            return False
        return True

    def _allocate(self, storage: int, stream: int, num_bytes: int, now: int) -> None:
        while self._late and self._late[0][0] <= now:
            self._allocator.release(self._late.pop(0)[2])
        self._release(storage, -1, now)
        block = self._allocator.allocate(stream, num_bytes)
        is_gathered = storage in self._full_weights
        self._held[storage] = _Held(block=block, is_gathered=is_gathered)
        if is_gathered:
            self._gathered += block.size

    def _release(self, storage: int, seq: int, now: int) -> None:
        held = self._held.pop(storage, None)
        if held is None:
            return
        if held.is_gathered:
            self._gathered -= held.block.size
        free_at = max((self._end_of(stream, seq) for stream in held.users), default=now)
        if free_at <= now:
            self._allocator.release(held.block)
        else:
            self._num_late += 1
            insort(self._late, (free_at, self._num_late, held.block))

    def _end_of(self, stream: int, seq: int) -> int:
        """Returns when a stream is done with all that it was given before a record."""
        seqs, ends = self._ends.get(stream, ([], []))
        place = bisect_right(seqs, seq)
        return ends[place - 1] if place else 0


def _ends_by_stream(replay: Replay, rank: int) -> dict[int, tuple[list[int], list[int]]]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    for span in replay.spans(rank):
        seqs, ends = found.setdefault(span.stream, ([], []))
        seqs.append(span.seq)
        ends.append(span.end)
    return found


def _before(trace: Trace, seq: int) -> list[Record]:
    return [record for record in trace.records if record["seq"] < seq]
