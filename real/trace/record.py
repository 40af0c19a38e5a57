"""The schema of a trace: which operations a record may name and which fields each one carries.

A record is one JSON object on one line. `seq` counts records in host order on that rank and `op`
names the operation; all other fields depend on `op` and are listed in `FIELDS`. Ids (streams,
events, storages) are small integers in order of first appearance, so two runs of the same
scenario write the same bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SCHEMA_VERSION: Final = 2
"""Raised when a field changes its meaning; readers refuse versions they do not know."""


class TraceError(ValueError):
    """A trace file that cannot be read: the message names the file, the line and the reason."""


class OpKind(StrEnum):
    """What a record says was done."""

    HEADER = "header"
    END = "end"
    # Streams and events.
    STREAM = "stream"
    STREAM_ROLE = "stream_role"
    EVENT_RECORD = "event_record"
    EVENT_WAIT = "event_wait"
    STREAM_WAIT = "stream_wait"
    HOST_SYNC = "host_sync"
    # Storage.
    RECORD_STREAM = "record_stream"
    RESIZE = "resize"
    ALLOCATE = "allocate"
    FREE = "free"
    NAME = "name"
    KERNEL = "kernel"
    # Communication.
    GROUP = "group"
    COLLECTIVE = "collective"
    COLLECTIVE_WAIT = "collective_wait"
    # Graph capture.
    CAPTURE = "capture"
    # Profiler ranges.
    NVTX_PUSH = "nvtx_push"
    NVTX_POP = "nvtx_pop"
    # The schedule.
    STEP = "step"
    NODE = "node"
    NODE_END = "node_end"
    # FSDP.
    INSTALL = "install"
    REMOVE = "remove"
    UNIT = "unit"
    PARAMETER = "parameter"
    HOOK = "hook"
    PHASE = "phase"
    UNSHARD = "unshard"
    WEIGHT_VERSION = "weight_version"
    RESHARD = "reshard"
    ZERO_FILL = "zero_fill"
    REDUCE = "reduce"
    GRADIENTS = "gradients"
    FENCE = "fence"
    OPTIMIZER_STEP = "optimizer_step"
    GRAD_READ = "grad_read"


_INT = (int,)
_STR = (str,)
_OPT_INT = (int, type(None))
_OPT_STR = (str, type(None))
_BOOL = (bool,)
_LIST = (list,)

FIELDS: Final[dict[OpKind, dict[str, tuple[type, ...]]]] = {
    OpKind.HEADER: {"schema": _INT, "rank": _INT, "world_size": _INT, "scenario": (dict,)},
    OpKind.END: {"records": _INT},
    OpKind.STREAM: {"stream": _INT, "priority": _INT},
    # What a stream is for: "compute", "communication", "all-gather" or "reduce-scatter".
    OpKind.STREAM_ROLE: {"stream": _INT, "role": _STR},
    OpKind.EVENT_RECORD: {"stream": _INT, "event": _INT},
    OpKind.EVENT_WAIT: {"stream": _INT, "event": _INT, "record": _OPT_INT},
    OpKind.STREAM_WAIT: {"stream": _INT, "on": _INT},
    OpKind.HOST_SYNC: {"what": _STR, "on": _OPT_INT},
    OpKind.RECORD_STREAM: {"stream": _INT, "storage": _INT},
    OpKind.RESIZE: {"stream": _INT, "storage": _INT, "bytes": _INT, "was": _INT},
    OpKind.ALLOCATE: {"stream": _INT, "storage": _INT, "bytes": _INT},
    OpKind.FREE: {"storage": _INT},
    OpKind.NAME: {"storage": _INT, "name": _STR},
    OpKind.KERNEL: {"stream": _INT, "name": _STR, "reads": _LIST, "writes": _LIST},
    OpKind.GROUP: {"group": _STR, "ranks": (list,)},
    OpKind.COLLECTIVE: {
        "stream": _INT,
        "group": _STR,
        "n": _INT,
        "kind": _STR,
        "bytes": _INT,
        "dtype": _STR,
        "async": _BOOL,
        "unit": _OPT_STR,
        "reads": _LIST,
        "writes": _LIST,
    },
    OpKind.COLLECTIVE_WAIT: {"stream": _INT, "group": _STR, "n": _INT},
    # `event` is "begin" or "end"; `stream` is the one that the capture begins on.
    OpKind.CAPTURE: {"event": _STR, "graph": _INT, "stream": _INT},
    OpKind.NVTX_PUSH: {"text": _STR},
    OpKind.NVTX_POP: {},
    OpKind.STEP: {"step": _INT, "event": _STR},
    OpKind.NODE: {
        "name": _STR,
        "direction": _STR,
        "layer": _OPT_STR,
        "microbatch": _OPT_INT,
        "chunk": _INT,
        "phase": _OPT_STR,
        "stream": _INT,
    },
    OpKind.NODE_END: {"name": _STR, "direction": _STR},
    # Models are numbered in order of their first installation.
    OpKind.INSTALL: {"model": _INT, "hooks": _INT},
    OpKind.REMOVE: {"model": _INT},
    OpKind.UNIT: {"unit": _STR, "parameters": _INT, "trainable": _INT, "bytes": _INT},
    # One a parameter: its owner (None without one), the gradients that it gets a microbatch (0 when
    # frozen), whether they come from a later weight-gradient call, and all its names when tied.
    OpKind.PARAMETER: {
        "parameter": _STR,
        "unit": _OPT_STR,
        "fires": _INT,
        "delayed": _BOOL,
        "names": _LIST,
        "shape": _LIST,
        "dtype": _STR,
    },
    OpKind.HOOK: {"point": _STR, "module": _STR, "unit": _STR},
    # A change of a unit's phase; `event` is what caused it (real.hooks.lifecycle).
    OpKind.PHASE: {"unit": _STR, "event": _STR, "before": _STR, "after": _STR},
    # Version counters of a unit's full parameters, summed, after their storage was filled.
    OpKind.WEIGHT_VERSION: {"unit": _STR, "version": _INT},
    OpKind.UNSHARD: {"unit": _STR, "stream": _INT, "gathered": _BOOL},
    OpKind.RESHARD: {"unit": _STR, "stream": _INT},
    OpKind.ZERO_FILL: {"unit": _STR, "parameter": _STR},
    # Which parameters of a unit have a gradient at the moment it is packed for its reduction.
    OpKind.GRADIENTS: {"unit": _STR, "present": _LIST, "missing": _LIST},
    OpKind.REDUCE: {"unit": _STR, "stream": _INT, "last": _BOOL, "zero_filled": _INT},
    OpKind.FENCE: {"stream": _INT},
    OpKind.OPTIMIZER_STEP: {"stream": _INT},
    OpKind.GRAD_READ: {"stream": _INT, "by": _STR},
}
"""Required fields of each operation, beside `seq` and `op`, with the accepted types."""

OPTIONAL: Final[dict[str, tuple[type, ...]]] = {
    "host_ns": _INT,
    "start_ns": _INT,
    "end_ns": _INT,
}
"""Fields that any record may carry: when the host issued it, and when the device ran it.

Nanoseconds since the trace began. Only traces of a GPU run have them, and only when asked for.
"""

OPTIONAL_OF: Final[dict[OpKind, dict[str, tuple[type, ...]]]] = {
    # What ran: the target and the release and folder of its Megatron; what stands for the other
    # ranks ("loopback" where one rank was run alone); and bounds that the target declares: the
    # most units that are unsharded at once, as {"unsharded": 4}.
    OpKind.HEADER: {
        "target": _STR,
        "megatron": _STR,
        "tree": _OPT_STR,
        "peers": _STR,
        "bounds": (dict,),
    },
    # Shapes of the tensors read and written, each with its dtype in front: ["bf16", 64, 32].
    # Whether autograd launched it, which costs the host less than Python does.
    OpKind.KERNEL: {"shapes": _LIST, "backward": _BOOL},
    OpKind.NAME: {"bytes": _INT},
    # The other rank of a message; messages are numbered per pair and direction.
    OpKind.COLLECTIVE: {"peer": _INT},
    OpKind.COLLECTIVE_WAIT: {"peer": _INT, "kind": _STR},
    # Ranks that hold the shards, and what gradients are divided by before they are reduced.
    OpKind.UNIT: {"ranks": _LIST, "divisor": _INT},
    # Whether autograd is running: a forward hook seen then belongs to a recomputation.
    OpKind.HOOK: {"in_backward": _BOOL},
}
"""Fields that records of one operation may carry."""


def validate_record(record: object) -> None:
    """Checks one decoded record against the schema.

    Raises:
        ValueError: `record` is no object, names an unknown operation, lacks a field, has an
            unknown one or one of the wrong type. The message says what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(f"Expected a JSON object, got {type(record).__name__}.")
    try:
        op = OpKind(record["op"])
    except (KeyError, ValueError):
        known = ", ".join(OpKind)
        raise ValueError(f"Expected 'op' to be one of {known}; got {record.get('op')!r}.") from None
    if type(record.get("seq")) is not int:
        raise ValueError(f"Expected an integer 'seq', got {record.get('seq')!r}.")
    required = FIELDS[op]
    allowed = {**required, **OPTIONAL, **OPTIONAL_OF.get(op, {})}
    for name in required:
        if name not in record:
            raise ValueError(f"Expected field {name!r} in a {op} record, got none.")
    for name, value in record.items():
        if name in ("seq", "op"):
            continue
        types = allowed.get(name)
        if types is None:
            extra = sorted(set(record) - set(allowed) - {"seq", "op"})
            raise ValueError(
                f"Expected no further fields in a {op} record, got {', '.join(extra)}."
            )
        # bool is an int in Python; a flag where a number belongs is a fault.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise ValueError(
                f"Expected {wanted} in field {name!r} of a {op} record, got {value!r}."
            )
