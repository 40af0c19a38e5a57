"""What a traced run gives its devices to do, in a form that can be run in any legal order.

[Note: what is kept]
Only blocks of memory that two streams touch can be used in a wrong order, so kernels that touch no
such block are left out: they only fill time. Waits, host syncs and collectives all stay. A stream's
queue is known in advance, so an event is a place in it: "stream 2 has done its first 40". Kernels
of one stream that follow each other, with no such place between them and no wait of the host, are
one operation: whatever is unordered with one of them is unordered with all.

[Note: when memory is gone]
A release (resize to 0) is an operation of the stream that releases: from then on the block must not
be used, whether or not somebody gets it. A freed block goes back to the pool of the stream that
allocated it, and the next allocations of that stream that fit in it may get it: each is an
operation that may overwrite one such block. Streams that the allocator was told of
(`record_stream`) hold a block back until they have done what they had when it was given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from real.trace import OpKind, Trace
from real.trace.recorder import Record

_OFFERS: Final = 4
"""How many allocations that fit may get a freed block, before it counts as taken by others."""

_MESSAGES: Final = ("send", "recv")


class Code(IntEnum):
    """What one operation of a queue does."""

    WAIT = 0
    USE = 1
    COLLECTIVE = 2
    RELEASE = 3
    REUSE = 4


class Use(NamedTuple):
    """A read or write of one block.

    Attributes:
        block: The block.
        before: The write that the block holds then, in host order.
        after: What it holds afterwards; the same for a read.
        seq: Record that it comes from.
    """

    block: int
    before: int
    after: int
    seq: int


class Op(NamedTuple):
    """One operation of a queue.

    Attributes:
        code: What it does.
        seq: Record that it comes from.
        queue: WAIT: the queue that is waited for.
        least: WAIT: how many of its operations must be done.
        uses: Reads, then writes.
        meeting: COLLECTIVE: number of the meeting.
        offers: REUSE: blocks of which one may be taken.
    """

    code: Code
    seq: int
    queue: int = 0
    least: int = 0
    uses: tuple[Use, ...] = ()
    meeting: int = 0
    offers: tuple[int, ...] = ()


class HostStep(NamedTuple):
    """One step of a rank's host: waits, or puts the next operations into a queue.

    Attributes:
        queue: The queue that gets its next operations, or None.
        waits: Queues and how many of their operations must be done before.
        asks: Blocks that the allocator gives out only when what held them back is done.
        gets: How many operations the queue gets.
    """

    queue: int | None
    waits: tuple[tuple[int, int], ...] = ()
    asks: tuple[int, ...] = ()
    gets: int = 1


@dataclass(kw_only=True)
class Block:
    """One piece of memory, from one allocation to its release.

    Attributes:
        number: The storage that has it.
        owner: Queue of the stream that allocated it; None when the trace began with it.
        bytes: Its size.
        queues: Queues that use it.
        version: Its newest write in host order.
        protected: Queues that the allocator was told of.
        held_by: What must be done before it is given out.
        is_gone: Released or freed.
    """

    rank: int
    number: int
    owner: int | None = None
    bytes: int = 0
    queues: set[int] = field(default_factory=set)
    version: int = 0
    protected: set[int] = field(default_factory=set)
    held_by: tuple[tuple[int, int], ...] = ()
    is_gone: bool = False


class Late(NamedTuple):
    """A use of memory that was given back before it in host order, whatever the device does."""

    rank: int
    seq: int
    block: int


class Queue(NamedTuple):
    """A stream of one rank, or what stands for one.

    Attributes:
        stream: Its number; None for the queue of asynchronous collectives or a late release.
    """

    rank: int
    stream: int | None


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that the devices of one run have to do.

    Attributes:
        queues: All queues of all ranks.
        ops: The operations of each queue, in order.
        hosts: The steps of each rank's host.
        blocks: All blocks that more than one queue uses, by number.
        meetings: How many ranks each collective needs.
        calls: Rank, unit and kind of each collective operation, by queue and place.
        writers: Rank and record of each write, by version; version 0 is what was there before.
        late: Uses of memory that is gone in host order.
    """

    queues: list[Queue]
    ops: list[list[Op]]
    hosts: list[list[HostStep]]
    blocks: dict[int, Block]
    meetings: list[int]
    calls: dict[tuple[int, int], tuple[str | None, str]]
    writers: list[tuple[int, int]]
    late: list[Late]

    @property
    def num_ops(self) -> int:
        """Operations of all queues."""
        return sum(len(ops) for ops in self.ops)

    def queue_of(self, rank: int, stream: int) -> int | None:
        """Returns the queue of a rank's stream, or None."""
        key = Queue(rank, stream)
        return self.queues.index(key) if key in self.queues else None


def build_program(traces: Sequence[Trace]) -> Program:
    """Takes a run apart; its traces must have kernels, or only collectives and waits are kept."""
    shared = _Shared()
    for trace in traces:
        _RankBuilder(trace, shared).run()
    return shared.finish()


class _Shared:
    """What all ranks add to."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []
        self.ops: list[list[Op]] = []
        self.epochs: list[list[int]] = []
        self.hosts: list[list[HostStep]] = []
        self.blocks: list[Block] = []
        self.meetings: dict[tuple[Any, ...], int] = {}
        self.sizes: list[int] = []
        self.calls: dict[tuple[int, int], tuple[str | None, str]] = {}
        self.writers: list[tuple[int, int]] = [(-1, -1)]
        self.late: list[Late] = []

    def add_queue(self, rank: int, stream: int | None) -> int:
        self.queues.append(Queue(rank, stream))
        self.ops.append([])
        self.epochs.append([])
        return len(self.queues) - 1

    def finish(self) -> Program:
        """Leaves out what only one queue can see [Note: what is kept]."""
        kept = {
            number: block
            for number, block in enumerate(self.blocks)
            if len(block.queues | ({block.owner} - {None})) > 1
        }
        marks = self._marks(kept)
        shortened = [self._shorten(queue, kept, marks) for queue in range(len(self.ops))]
        places = [place for _, place, _ in shortened]
        all_ops = [
            [
                op._replace(least=places[op.queue][op.least]) if op.code is Code.WAIT else op
                for op in ops
            ]
            for ops, _, _ in shortened
        ]
        for block in kept.values():
            block.held_by = tuple((queue, places[queue][n]) for queue, n in block.held_by)
        return Program(
            queues=self.queues,
            ops=all_ops,
            hosts=[_kept_steps(steps, places, kept) for steps in self.hosts],
            blocks=kept,
            meetings=self.sizes,
            calls={place: call for _, _, calls in shortened for place, call in calls.items()},
            writers=self.writers,
            late=self.late,
        )

    def _marks(self, kept: dict[int, Block]) -> set[tuple[int, int]]:
        """Places in queues that somebody waits for."""
        marks = {(op.queue, op.least) for ops in self.ops for op in ops if op.code is Code.WAIT}
        marks.update(wait for steps in self.hosts for step in steps for wait in step.waits)
        marks.update(mark for block in kept.values() for mark in block.held_by)
        return marks

    def _shorten(
        self, queue: int, kept: dict[int, Block], marks: set[tuple[int, int]]
    ) -> tuple[list[Op], list[int], dict[tuple[int, int], tuple[str | None, str]]]:
        """Returns what is left of a queue, where each old place is in it, and its collectives."""
        left: list[Op] = []
        place = [0]
        calls = {}
        open_epoch: int | None = None  # of the last operation, while it can still take others
        for index, op in enumerate(self.ops[queue]):
            uses = tuple(use for use in op.uses if use.block in kept)
            offers = tuple(block for block in op.offers if block in kept)
            if (queue, index) in marks:
                open_epoch = None
            if op.code is Code.USE and uses and open_epoch == self.epochs[queue][index]:
                left[-1] = left[-1]._replace(uses=left[-1].uses + uses)
            elif uses or offers or op.code in (Code.WAIT, Code.COLLECTIVE):
                if op.code is Code.COLLECTIVE:
                    calls[queue, len(left)] = self.calls[queue, index]
                left.append(op._replace(uses=uses, offers=offers))
                open_epoch = self.epochs[queue][index] if op.code is Code.USE else None
            place.append(len(left))
        return left, place, calls


def _kept_steps(
    steps: list[HostStep], places: list[list[int]], kept: dict[int, Block]
) -> list[HostStep]:
    done = [0] * len(places)
    result: list[HostStep] = []
    for step in steps:
        if step.queue is None:
            waits = tuple((queue, places[queue][count]) for queue, count in step.waits)
            result.append(HostStep(None, waits))
            continue
        place = places[step.queue]
        done[step.queue] += 1
        if place[done[step.queue]] == place[done[step.queue] - 1]:
            continue
        asks = tuple(block for block in step.asks if block in kept)
        last = result[-1] if result else None
        if last is not None and last.queue == step.queue and not last.asks and not asks:
            result[-1] = last._replace(gets=last.gets + 1)
        else:
            result.append(HostStep(step.queue, (), asks))
    return result


class _RankBuilder:
    """Goes through one rank's trace."""

    def __init__(self, trace: Trace, shared: _Shared) -> None:
        self._trace = trace
        self._rank = trace.rank
        self._shared = shared
        self._steps: list[HostStep] = []
        self._num_host_waits = 0
        self._queues: dict[int, int] = {}
        self._async_queues: dict[tuple[str, int | None], int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._events: dict[int, tuple[int, int]] = {}
        self._ends: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._waited: dict[tuple[int, int], int] = {}
        self._blocks: dict[int, int] = {}
        self._pools: dict[int, list[list[int]]] = {}

    def run(self) -> None:
        """Adds this rank's queues and host steps."""
        for record in self._trace.records:
            take = _TAKE.get(record["op"])
            if take is not None:
                take(self, record)
        self._shared.hosts.append(self._steps)

    # -- streams ----------------------------------------------------------------------------

    def _queue(self, stream: int) -> int:
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = self._shared.add_queue(self._rank, stream)
        return queue

    def _mark(self, queue: int) -> tuple[int, int]:
        return queue, len(self._shared.ops[queue])

    def _put(self, queue: int, op: Op, asks: tuple[int, ...] = ()) -> None:
        self._shared.ops[queue].append(op)
        self._shared.epochs[queue].append(self._num_host_waits)
        self._steps.append(HostStep(queue, (), asks))

    def _wait(self, queue: int, mark: tuple[int, int], seq: int) -> None:
        other, count = mark
        if other == queue or count <= self._waited.get((queue, other), 0):
            return  # in order anyway, or waited for before
        self._waited[queue, other] = count
        self._put(queue, Op(Code.WAIT, seq, queue=other, least=count))

    def _event_record(self, record: Record) -> None:
        self._events[record["seq"]] = self._mark(self._queue(record["stream"]))

    def _event_wait(self, record: Record) -> None:
        if record["record"] is not None:
            self._wait(self._queue(record["stream"]), self._events[record["record"]], record["seq"])

    def _stream_wait(self, record: Record) -> None:
        mark = self._mark(self._queue(record["on"]))
        self._wait(self._queue(record["stream"]), mark, record["seq"])

    def _host_sync(self, record: Record) -> None:
        if record["what"] == "device":
            marks = [self._mark(queue) for queue in self._queues.values()]
        elif record["what"] == "stream":
            marks = [self._mark(self._queue(record["on"]))]
        elif record["on"] is not None:
            marks = [self._events[record["on"]]]
        else:
            return
        self._steps.append(HostStep(None, tuple(marks)))
        self._num_host_waits += 1

    # -- work -------------------------------------------------------------------------------

    def _kernel(self, record: Record) -> None:
        queue = self._queue(record["stream"])
        self._put(queue, Op(Code.USE, record["seq"], uses=self._uses(record, queue)))

    def _collective(self, record: Record) -> None:
        stream, seq = self._queue(record["stream"]), record["seq"]
        if record["kind"] in _MESSAGES:
            queue = self._message_queue(record)
            self._wait(queue, self._mark(stream), seq)
            self._put(queue, Op(Code.USE, seq, uses=self._uses(record, queue)))
            self._ends[_call_key(record)] = self._mark(queue)
            return
        queue = stream
        if record["async"]:
            queue = self._async_queue(record["group"])
            self._wait(queue, self._mark(stream), seq)
        ranks = self._groups.get(record["group"], (self._rank,))
        key = (record["group"], ranks, record["n"])
        meeting = self._shared.meetings.setdefault(key, len(self._shared.sizes))
        if meeting == len(self._shared.sizes):
            self._shared.sizes.append(len(ranks))
        place = (queue, len(self._shared.ops[queue]))
        self._shared.calls[place] = (record["unit"], record["kind"])
        uses = self._uses(record, queue)
        self._put(queue, Op(Code.COLLECTIVE, seq, uses=uses, meeting=meeting))
        self._ends[_call_key(record)] = self._mark(queue)

    def _async_queue(self, group: str, peer: int | None = None) -> int:
        queue = self._async_queues.get((group, peer))
        if queue is None:
            queue = self._async_queues[group, peer] = self._shared.add_queue(self._rank, None)
        return queue

    def _message_queue(self, record: Record) -> int:
        """Messages of a pair run in order; who sends waits for nobody here."""
        return self._async_queue(record["group"], record.get("peer"))

    def _collective_wait(self, record: Record) -> None:
        end = self._ends.get(_call_key(record))
        if end is not None:
            self._wait(self._queue(record["stream"]), end, record["seq"])

    def _group(self, record: Record) -> None:
        self._groups[record["group"]] = tuple(record["ranks"])

    def _uses(self, record: Record, queue: int) -> tuple[Use, ...]:
        uses = []
        for number in record["reads"]:
            block = self._used(number, queue, record["seq"])
            version = self._shared.blocks[block].version
            uses.append(Use(block, version, version, record["seq"]))
        version = len(self._shared.writers)
        if record["writes"]:
            self._shared.writers.append((self._rank, record["seq"]))
        for number in record["writes"]:
            block = self._used(number, queue, record["seq"])
            known = self._shared.blocks[block]
            # A block that is read and written by one operation was read first.
            uses.append(Use(block, known.version, version, record["seq"]))
            known.version = version
        return tuple(uses)

    def _used(self, number: int, queue: int, seq: int) -> int:
        block = self._block(number)
        known = self._shared.blocks[block]
        known.queues.add(queue)
        if known.is_gone:
            self._shared.late.append(Late(self._rank, seq, block))
        return block

    # -- memory -----------------------------------------------------------------------------

    def _block(self, number: int) -> int:
        block = self._blocks.get(number)
        return self._new_block(number) if block is None else block

    def _new_block(self, number: int, owner: int | None = None, size: int = 0) -> int:
        block = self._blocks[number] = len(self._shared.blocks)
        self._shared.blocks.append(Block(rank=self._rank, number=number, owner=owner, bytes=size))
        return block

    def _allocate(self, record: Record) -> None:
        queue = self._queue(record["stream"])
        self._offer(queue, record["bytes"], record["seq"])
        self._new_block(record["storage"], queue, record["bytes"])

    def _offer(self, queue: int, size: int, seq: int) -> None:
        pool = self._pools.get(queue, [])
        fitting = [entry for entry in pool if self._shared.blocks[entry[0]].bytes >= size]
        if not fitting:
            return
        for entry in fitting:
            entry[1] += 1
        self._pools[queue] = [entry for entry in pool if entry[1] < _OFFERS]
        offers = tuple(entry[0] for entry in fitting)
        self._put(queue, Op(Code.REUSE, seq, offers=offers), asks=offers)

    def _resize(self, record: Record) -> None:
        queue = self._queue(record["stream"])
        if record["bytes"] == 0:
            self._release(record, queue)
        elif record["was"] == 0:
            self._offer(queue, record["bytes"], record["seq"])
            self._new_block(record["storage"], queue, record["bytes"])

    def _release(self, record: Record, queue: int) -> None:
        block = self._block(record["storage"])
        known = self._shared.blocks[block]
        known.queues.add(queue)
        uses = (Use(block, known.version, -1, record["seq"]),)
        if known.protected - {queue}:
            # The allocator holds it back, and no stream waits for that.
            own = self._shared.add_queue(self._rank, None)
            known.queues.add(own)
            for other in sorted({queue, *known.protected}):
                self._wait(own, self._mark(other), record["seq"])
            queue = own
        self._put(queue, Op(Code.RELEASE, record["seq"], uses=uses))
        if known.owner != queue:
            self._give_back(block)
        known.is_gone = True

    def _record_stream(self, record: Record) -> None:
        known = self._shared.blocks[self._block(record["storage"])]
        known.protected.add(self._queue(record["stream"]))

    def _free(self, record: Record) -> None:
        block = self._blocks.pop(record["storage"], None)
        if block is not None and not self._shared.blocks[block].is_gone:
            self._give_back(block)
            self._shared.blocks[block].is_gone = True

    def _give_back(self, block: int) -> None:
        known = self._shared.blocks[block]
        if known.owner is None or not known.queues - known.protected - {known.owner}:
            return  # whoever else used it is waited for by the allocator
        known.held_by = tuple(self._mark(queue) for queue in sorted(known.protected))
        self._pools.setdefault(known.owner, []).append([block, 0])


def _call_key(record: Record) -> tuple[Any, ...]:
    """Tells calls of one rank apart; messages are numbered for each pair and direction."""
    peer = record.get("peer")
    return record["group"], record["n"], peer, None if peer is None else record["kind"]


_TAKE: Final = {
    OpKind.EVENT_RECORD: _RankBuilder._event_record,
    OpKind.EVENT_WAIT: _RankBuilder._event_wait,
    OpKind.STREAM_WAIT: _RankBuilder._stream_wait,
    OpKind.HOST_SYNC: _RankBuilder._host_sync,
    OpKind.KERNEL: _RankBuilder._kernel,
    OpKind.COLLECTIVE: _RankBuilder._collective,
    OpKind.COLLECTIVE_WAIT: _RankBuilder._collective_wait,
    OpKind.GROUP: _RankBuilder._group,
    OpKind.ALLOCATE: _RankBuilder._allocate,
    OpKind.FREE: _RankBuilder._free,
    OpKind.RESIZE: _RankBuilder._resize,
    OpKind.RECORD_STREAM: _RankBuilder._record_stream,
}
