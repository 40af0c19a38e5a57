"""Records as types, one an operation, for code that a type checker reads.

A trace keeps plain dictionaries; `select(trace.records, Kernel)` yields those of one operation
with their type. Fields that not every record has are `NotRequired`. A test holds these types
against the schema (`real.trace.record`), which is what readers validate by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NotRequired, TypedDict, cast

from real.trace.record import OpKind
from real.trace.recorder import Record as PlainRecord


class AnyRecord(TypedDict):
    """What every record has, and the times that those of a GPU run may have."""

    seq: int
    op: str
    host_ns: NotRequired[int]
    start_ns: NotRequired[int]
    end_ns: NotRequired[int]


class OfUnit(AnyRecord):
    """A record about a unit, in chunk 0 where it names none."""

    unit: str
    chunk: NotRequired[int]


class Header(AnyRecord):
    """The first record: of which run, and on which rank."""

    schema: int
    rank: int
    world_size: int
    scenario: dict[str, Any]
    target: NotRequired[str]
    megatron: NotRequired[str]
    tree: NotRequired[str | None]
    peers: NotRequired[str]
    bounds: NotRequired[dict[str, int]]


class End(AnyRecord):
    """The last record of a run that was not cut short."""

    records: int


class Stream(AnyRecord):
    """A stream that is used for the first time."""

    stream: int
    priority: int


class StreamRole(AnyRecord):
    """What a stream is for."""

    stream: int
    role: str


class Event(AnyRecord):
    """An event is recorded on a stream."""

    stream: int
    event: int


class EventWait(AnyRecord):
    """A stream waits for the record of an event, None for one that was never recorded."""

    stream: int
    event: int
    record: int | None


class StreamWait(AnyRecord):
    """A stream waits for another one."""

    stream: int
    on: int


class HostSync(AnyRecord):
    """The host waits for a stream, an event or the device."""

    what: str
    on: int | None


class RecordStream(AnyRecord):
    """The allocator is told of a further stream that uses a storage."""

    stream: int
    storage: int


class Resize(AnyRecord):
    """A storage gets another size, 0 where its memory is released."""

    stream: int
    storage: int
    bytes: int
    was: int


class Allocate(AnyRecord):
    """Memory comes from the pool of a stream."""

    stream: int
    storage: int
    bytes: int


class Free(AnyRecord):
    """Memory goes back to its pool."""

    storage: int


class Name(OfUnit):
    """What a storage holds."""

    storage: int
    kind: str
    bytes: NotRequired[int]


class Kernel(AnyRecord):
    """A kernel with the storages that it reads and writes."""

    stream: int
    name: str
    reads: list[int]
    writes: list[int]
    shapes: NotRequired[list[list[str | int]]]
    backward: NotRequired[bool]


class Group(AnyRecord):
    """A communicator."""

    group: str
    ranks: list[int]


_Async = TypedDict("_Async", {"async": bool})  # a keyword, so no field of a class


class Collective(AnyRecord, _Async):
    """A collective, or a message where it has a peer."""

    stream: int
    group: str
    n: int
    kind: str
    bytes: int
    dtype: str
    unit: str | None
    reads: list[int]
    writes: list[int]
    chunk: NotRequired[int]
    peer: NotRequired[int]


class CollectiveWait(AnyRecord):
    """A stream waits for a collective or a message."""

    stream: int
    group: str
    n: int
    peer: NotRequired[int]
    kind: NotRequired[str]


class Capture(AnyRecord):
    """The border of a graph capture."""

    event: str
    graph: int
    stream: int


class NvtxPush(AnyRecord):
    """A profiler range is opened."""

    text: str


class NvtxPop(AnyRecord):
    """A profiler range is closed."""


class Step(AnyRecord):
    """The border of an optimizer step."""

    step: int
    event: str


class Node(AnyRecord):
    """A node of the schedule begins."""

    name: str
    direction: str
    layer: str | None
    microbatch: int | None
    chunk: int
    phase: str | None
    stream: int


class NodeEnd(AnyRecord):
    """A node of the schedule ends."""

    name: str
    direction: str


class Install(AnyRecord):
    """Hooks are installed on a model."""

    model: int
    hooks: int


class Remove(AnyRecord):
    """Hooks are removed from a model."""

    model: int


class Unit(OfUnit):
    """A unit is declared."""

    parameters: int
    trainable: int
    bytes: int
    ranks: NotRequired[list[int]]
    divisor: NotRequired[int]
    kept: NotRequired[bool]


class Parameter(AnyRecord):
    """A parameter is declared with its owner."""

    parameter: str
    unit: str | None
    fires: int | None
    delayed: bool
    names: list[str]
    shape: list[int]
    dtype: str
    chunk: NotRequired[int]


class Hook(OfUnit):
    """A hook fires."""

    point: str
    module: str
    in_backward: NotRequired[bool]


class Phase(OfUnit):
    """A unit changes its phase."""

    event: str
    before: str
    after: str


class Unshard(OfUnit):
    """A unit is asked for, and gathered if it was not there."""

    stream: int
    gathered: bool


class WeightVersion(OfUnit):
    """Version counters of a unit's full weights, summed, after a gather."""

    version: int


class Reshard(OfUnit):
    """A unit is released."""

    stream: int


class ZeroFill(OfUnit):
    """A gradient that did not come is filled with zeros."""

    parameter: str


class Reduce(OfUnit):
    """The reduction of a unit is launched."""

    stream: int
    last: bool
    zero_filled: int


class Gradients(OfUnit):
    """Which gradients a unit has when it is packed."""

    present: list[str]
    missing: list[str]


class Fence(AnyRecord):
    """A stream waits for all reductions."""

    stream: int


class OptimizerStep(AnyRecord):
    """The optimizer begins to step."""

    stream: int


class GradRead(AnyRecord):
    """Gradients are read, as for their norm."""

    stream: int
    by: str


TYPES: Final[dict[OpKind, type[AnyRecord]]] = {
    OpKind.HEADER: Header,
    OpKind.END: End,
    OpKind.STREAM: Stream,
    OpKind.STREAM_ROLE: StreamRole,
    OpKind.EVENT_RECORD: Event,
    OpKind.EVENT_WAIT: EventWait,
    OpKind.STREAM_WAIT: StreamWait,
    OpKind.HOST_SYNC: HostSync,
    OpKind.RECORD_STREAM: RecordStream,
    OpKind.RESIZE: Resize,
    OpKind.ALLOCATE: Allocate,
    OpKind.FREE: Free,
    OpKind.NAME: Name,
    OpKind.KERNEL: Kernel,
    OpKind.GROUP: Group,
    OpKind.COLLECTIVE: Collective,
    OpKind.COLLECTIVE_WAIT: CollectiveWait,
    OpKind.CAPTURE: Capture,
    OpKind.NVTX_PUSH: NvtxPush,
    OpKind.NVTX_POP: NvtxPop,
    OpKind.STEP: Step,
    OpKind.NODE: Node,
    OpKind.NODE_END: NodeEnd,
    OpKind.INSTALL: Install,
    OpKind.REMOVE: Remove,
    OpKind.UNIT: Unit,
    OpKind.PARAMETER: Parameter,
    OpKind.HOOK: Hook,
    OpKind.PHASE: Phase,
    OpKind.UNSHARD: Unshard,
    OpKind.WEIGHT_VERSION: WeightVersion,
    OpKind.RESHARD: Reshard,
    OpKind.ZERO_FILL: ZeroFill,
    OpKind.REDUCE: Reduce,
    OpKind.GRADIENTS: Gradients,
    OpKind.FENCE: Fence,
    OpKind.OPTIMIZER_STEP: OptimizerStep,
    OpKind.GRAD_READ: GradRead,
}
"""The type of each operation's records."""

_OPS: Final = {of: op for op, of in TYPES.items()}


def select[R: AnyRecord](records: Iterable[PlainRecord], of: type[R]) -> Iterator[R]:
    """Yields the records of one operation, named by their type."""
    op = _OPS[of]
    for record in records:
        if record["op"] == op:
            yield cast("R", record)
