"""From traces to programs: what each record costs, on which stream it runs and what it waits for.

One optimizer step is taken out of the trace and starts on idle devices. Events of earlier records
are done. A collective runs on the stream that it was called on; an asynchronous one runs on its
communicator's own stream, as NCCL's does, after what the calling stream has queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from real.trace import Trace
from real.trace.recorder import Record
from sim.timing.costs.collectives import Placement, is_all_to_all
from sim.timing.costs.model import CostModel
from sim.timing.replay.hostwork import host_work
from sim.timing.replay.program import (
    COLLECTIVE,
    KERNEL,
    RECORD,
    WAIT,
    CollectiveSpec,
    Program,
    RankProgram,
    ReplayError,
    Segment,
)

_POINT_TO_POINT: Final = ("send", "recv")
_QUEUE_PARTS: Final = 4  # the host looks at a full queue after each quarter of it


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a replay changes beside the costs. The defaults change nothing.

    Attributes:
        connections: Hardware queues that streams are spread over (CUDA_DEVICE_MAX_CONNECTIONS);
            work of one queue starts in host order. None: a queue for every stream.
        queue_depth: Launches that a stream's queue holds before the host has to wait; None: all.
        imbalance: Tokens of each group's first rank over the mean, relative to the trace.
        straggler: How many times longer every kernel of one rank takes.
        straggler_rank: That rank.
    """

    connections: int | None = None
    queue_depth: int | None = None
    imbalance: float = 1.0
    straggler: float = 1.0
    straggler_rank: int = 0


AS_RECORDED: Final = Conditions()

Place = Callable[[str, Sequence[int]], Placement]
"""Says where the ranks of a group are, given its name and its ranks in the trace."""


@dataclass(kw_only=True, slots=True)
class _Collective:
    """What the ranks of a group say of one collective.

    Attributes:
        record: The record of the first rank.
        ranks: Ranks in whose trace it is.
        num_bytes: Most bytes that a rank gives or gets.
    """

    record: Record
    index: int
    ranks: list[int] = field(default_factory=list)
    num_bytes: int = 0


def group_of(communicator: str) -> str:
    """Returns the group in the trace; a variant may give it several communicators."""
    return communicator.partition("#")[0]


def step_records(trace: Trace, step: int | None = None) -> list[Record]:
    """Returns the records of one step, without its marks; None takes the last complete one.

    Raises:
        ReplayError: There is no such step.
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for place, record in enumerate(trace.records):
        if record["op"] == "step":
            (begins if record["event"] == "begin" else ends)[record["step"]] = place
    complete = sorted(set(begins) & set(ends))
    if not complete or (step is not None and step not in complete):
        wanted = "a complete step" if step is None else f"step {step}"
        got = ", ".join(map(str, complete)) or "none"
        raise ReplayError(f"Expected {wanted} in the trace of rank {trace.rank}, got {got}.")
    chosen = complete[-1] if step is None else step
    return trace.records[begins[chosen] + 1 : ends[chosen]]


def lower(
    traces: Sequence[Trace],
    model: CostModel,
    *,
    step: int | None = None,
    conditions: Conditions = AS_RECORDED,
    place: Place | None = None,
) -> Program:
    """Returns the program of one step of all ranks.

    Args:
        traces: All ranks, in order.
        model: What things cost.
        step: The step; None for the last.
        conditions: What to change.
        place: Where groups are; None puts rank after rank on nodes.

    Raises:
        ReplayError: Kernels have no shapes, there is no such step, or a record is of a kind that
            has no model.
    """
    shared: dict[tuple[str, int], _Collective] = {}
    sizes = {group: len(ranks) for group, ranks in _groups(traces).items()}
    where: Place = place if place is not None else lambda _, ranks: model.placement(ranks)
    placements = {group: where(group, ranks) for group, ranks in _groups(traces).items()}
    lowered = [
        _RankLowering(trace, model, conditions, shared, placements).run(step_records(trace, step))
        for trace in traces
    ]
    specs = [_spec(key, found, model, sizes, placements) for key, found in shared.items()]
    cluster = model.cluster
    return Program(
        ranks=lowered,
        collectives=specs,
        compute_slowdown=cluster.compute_slowdown,
        communication_slowdown=cluster.communication_slowdown,
    )


def _groups(traces: Sequence[Trace]) -> dict[str, list[int]]:
    return {
        record["group"]: record["ranks"]
        for trace in traces
        for record in trace.records
        if record["op"] == "group"
    }


def _spec(
    key: tuple[str, int],
    found: _Collective,
    model: CostModel,
    sizes: Mapping[str, int],
    placements: Mapping[str, Placement],
) -> CollectiveSpec:
    communicator, record = key[0], found.record
    placement = placements[group_of(communicator)]
    if record["kind"] == "all_gather":
        # A shard is smaller when the group is larger than in the trace.
        found.num_bytes = found.num_bytes * sizes[group_of(communicator)] // placement.num_ranks
    return CollectiveSpec(
        communicator=communicator,
        kind=record["kind"],
        unit=record["unit"],
        ranks=tuple(found.ranks),
        work_ns=model.collective_ns(record["kind"], found.num_bytes, placement),
        tiers=placement.tiers,
        num_bytes=found.num_bytes,
    )


class _RankLowering:
    """Lowers one rank's records."""

    def __init__(
        self,
        trace: Trace,
        model: CostModel,
        conditions: Conditions,
        shared: dict[tuple[str, int], _Collective],
        placements: Mapping[str, Placement],
    ) -> None:
        self._trace = trace
        self._model = model
        self._conditions = conditions
        self._shared = shared
        self._placements = placements
        self._program = RankProgram(rank=trace.rank, segments=[Segment()])
        self._host = 0.0
        self._latency = model.cluster.launch_latency_ns
        self._next_mark = -1
        self._marks: set[int] = set()  # records of events in this step
        self._sizes: dict[int, int] = {}
        self._own_streams: dict[str, int] = {}
        self._async_marks: dict[tuple[str, int], int] = {}
        self._queues: dict[int, tuple[int, bool]] = {}
        self._depth_marks: dict[int, list[int]] = {}
        self._launched: dict[int, int] = {}
        self._experts = 0
        self._is_first = False
        self._slow = conditions.straggler if trace.rank == conditions.straggler_rank else 1.0

    def run(self, records: list[Record]) -> RankProgram:
        for record in self._trace.records:
            if record["op"] in ("allocate", "resize"):
                self._sizes.setdefault(record["storage"], record["bytes"])
        for record, work in zip(records, host_work(records, self._model), strict=True):
            self._host += work.own + work.node
            handler = _HANDLERS.get(record["op"])
            if handler is not None:
                handler(self, record)
        self._program.segments[-1].host_ns = int(self._host)
        return self._program

    # -- appending --------------------------------------------------------------------------

    def _append(self, stream: int, kind: int, argument: int, seq: int) -> None:
        program, conditions = self._program, self._conditions
        if conditions.queue_depth is not None and kind <= COLLECTIVE:
            self._wait_for_room(stream, conditions.queue_depth, seq)
        if conditions.connections is not None:
            self._alias(stream, kind, conditions.connections)
        ops = program.streams.get(stream)
        if ops is None:
            ops = program.streams[stream] = []
        segment = len(program.segments) - 1
        ops.append((kind, segment, int(self._host + self._latency), argument, seq))

    def _alias(self, stream: int, kind: int, connections: int) -> None:
        """Puts an operation after the start of the one before it in its hardware queue."""
        streams = self._program.streams
        known = list(streams)
        queue = (known.index(stream) if stream in streams else len(known)) % connections
        before = self._queues.get(queue)
        self._queues[queue] = (stream, kind <= COLLECTIVE)
        if before is None or before[0] == stream:
            return
        other, is_work = before
        ops, mark = streams[other], self._new_mark()
        position = len(ops) - 1 if is_work else len(ops)
        ops.insert(position, (RECORD, ops[-1][1], ops[-1][2], mark, -1))
        streams.setdefault(stream, []).append(
            (WAIT, len(self._program.segments) - 1, int(self._host), mark, -1)
        )

    def _wait_for_room(self, stream: int, depth: int, seq: int) -> None:
        """Makes the host wait before a launch while a stream's queue is full.

        It looks after each quarter of the queue only: between, a mark would cost more than it says.
        """
        part = max(1, depth // _QUEUE_PARTS)
        launched = self._launched.get(stream, 0)
        self._launched[stream] = launched + 1
        if not launched or launched % part:
            return
        mark = self._new_mark()
        marks = self._depth_marks.setdefault(stream, [])
        marks.append(mark)
        self._program.streams[stream].append((RECORD, 0, 0, mark, -1))
        place = len(marks) - max(1, depth // part)
        if place >= 0:
            self._break([marks[place]], seq)

    def _new_mark(self) -> int:
        self._next_mark -= 1
        return self._next_mark

    def _break(self, marks: Sequence[int], seq: int) -> None:
        """Ends the segment: the host waits."""
        segment = self._program.segments[-1]
        segment.host_ns, segment.waits, segment.seq = int(self._host), tuple(marks), seq
        self._program.segments.append(Segment())
        self._host = 0.0

    # -- records ----------------------------------------------------------------------------

    def _kernel(self, record: Record) -> None:
        if "end_ns" in record:
            duration = record["end_ns"] - record["start_ns"]
        elif "shapes" in record:
            duration = self._model.kernel_ns(record["name"], record["shapes"])
        else:
            raise ReplayError(
                "Expected kernels with shapes in the trace, got none; `python -m sim run "
                "--shapes-only` records them."
            )
        factor = self._slow
        if self._experts and self._conditions.imbalance != 1.0:
            factor *= self._share(self._experts)
        if duration:
            self._append(record["stream"], KERNEL, round(duration * factor), record["seq"])

    def _share(self, num_ranks: int) -> float:
        """Returns this rank's tokens over the mean: the first rank of a group has the most."""
        hot = min(self._conditions.imbalance, num_ranks)
        if self._is_first:
            return hot
        return (num_ranks - hot) / (num_ranks - 1)

    def _node(self, record: Record) -> None:
        ranks = self._expert_ranks
        self._is_first = bool(ranks) and ranks[0] == self._trace.rank
        self._experts = len(ranks) if record["name"] == "mlp" and len(ranks) > 1 else 0

    @property
    def _expert_ranks(self) -> list[int]:
        size = self._trace.scenario.get("expert_model_parallel_size", 1)
        first = self._trace.rank - self._trace.rank % size
        return list(range(first, first + size))

    def _node_end(self, record: Record) -> None:
        self._experts = 0

    def _event_record(self, record: Record) -> None:
        self._marks.add(record["seq"])
        self._append(record["stream"], RECORD, record["seq"], record["seq"])

    def _event_wait(self, record: Record) -> None:
        if record["record"] in self._marks:
            self._append(record["stream"], WAIT, record["record"], record["seq"])

    def _stream_wait(self, record: Record) -> None:
        if record["on"] in self._program.streams and record["on"] != record["stream"]:
            mark = self._new_mark()
            self._append(record["on"], RECORD, mark, record["seq"])
            self._append(record["stream"], WAIT, mark, record["seq"])

    def _host_sync(self, record: Record) -> None:
        what, on = record["what"], record["on"]
        if what == "event":
            if on in self._marks:
                self._break([on], record["seq"])
            return
        streams = [*self._program.streams] if what == "device" else [on]
        marks = []
        for stream in streams:
            if stream in self._program.streams:
                marks.append(self._new_mark())
                self._append(stream, RECORD, marks[-1], record["seq"])
        if marks:
            self._break(marks, record["seq"])

    def _allocate(self, record: Record) -> None:
        if record["bytes"]:
            self._sizes[record["storage"]] = record["bytes"]

    def _collective(self, record: Record) -> None:
        group, n, kind = record["group"], record["n"], record["kind"]
        if kind in _POINT_TO_POINT:
            raise ReplayError(
                f"Expected collectives of whole groups, got a {kind} in record {record['seq']} of "
                f"rank {self._trace.rank}: messages between two ranks have no model yet."
            )
        num_bytes = self._given_bytes(record)
        stream = record["stream"]
        if record["async"]:
            own = self._own_streams.setdefault(group, -1 - len(self._own_streams))
            mark = self._new_mark()
            self._append(stream, RECORD, mark, -1)
            self._append(own, WAIT, mark, -1)
            stream = own
        if self._placements[group_of(group)].num_ranks == 1:
            if record["reads"] != record["writes"] and num_bytes:
                duration = self._model.copy_ns(num_bytes)
                self._append(stream, KERNEL, duration, record["seq"])
        else:
            self._append(stream, COLLECTIVE, self._join(group, n, record, num_bytes), record["seq"])
        if record["async"]:
            mark = self._async_marks[group, n] = self._new_mark()
            self._append(stream, RECORD, mark, -1)

    def _given_bytes(self, record: Record) -> int:
        num_bytes: int = record["bytes"]
        if not is_all_to_all(record["kind"]):
            return num_bytes
        # What a rank gets is in its outputs, which were just allocated for it.
        num_bytes = max(num_bytes, sum(self._sizes.get(s, 0) for s in record["writes"]))
        ranks = self._placements[group_of(record["group"])].num_ranks
        if self._conditions.imbalance != 1.0 and ranks > 1:
            num_bytes = round(num_bytes * min(self._conditions.imbalance, ranks))
        return num_bytes

    def _join(self, group: str, n: int, record: Record, num_bytes: int) -> int:
        found = self._shared.get((group, n))
        if found is None:
            found = _Collective(record=record, index=len(self._shared))
            self._shared[group, n] = found
        found.ranks.append(self._trace.rank)
        found.num_bytes = max(found.num_bytes, num_bytes)
        return found.index

    def _collective_wait(self, record: Record) -> None:
        mark = self._async_marks.get((record["group"], record["n"]))
        if mark is not None:
            self._append(record["stream"], WAIT, mark, record["seq"])


_HANDLERS: Final[dict[str, Callable[[Any, Record], None]]] = {
    "kernel": _RankLowering._kernel,
    "node": _RankLowering._node,
    "node_end": _RankLowering._node_end,
    "event_record": _RankLowering._event_record,
    "event_wait": _RankLowering._event_wait,
    "stream_wait": _RankLowering._stream_wait,
    "host_sync": _RankLowering._host_sync,
    "allocate": _RankLowering._allocate,
    "resize": _RankLowering._allocate,
    "collective": _RankLowering._collective,
    "collective_wait": _RankLowering._collective_wait,
}
