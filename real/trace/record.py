"""The schema of a trace: which operations a record may name and which fields each one carries.

A record is one JSON object on one line. `seq` counts records in host order on that rank and `op`
names the operation; all other fields depend on `op` and are listed in `FIELDS`. Ids (streams,
events, storages) are small integers in order of first appearance, so two runs of the same
scenario write the same bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SCHEMA_VERSION: Final = 3
"""Raised when a field changes its meaning; readers refuse versions they do not know."""

READABLE_VERSIONS: Final = (2, 3)
"""Versions that are read: records of the older one are converted (`upgraded`)."""


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
    # What a storage holds: a unit's "full weight", "model weight", "main gradient", ...
    OpKind.NAME: {"storage": _INT, "unit": _STR, "kind": _STR},
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
    # frozen, None when nobody knows), whether they come from a later weight-gradient call, and all
    # its names when tied.
    OpKind.PARAMETER: {
        "parameter": _STR,
        "unit": _OPT_STR,
        "fires": _OPT_INT,
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

_OPTIONAL_OF: Final[dict[OpKind, dict[str, tuple[type, ...]]]] = {
    # What ran: the target and the release and folder of its Megatron; what stands for the other
    # ranks ("loopback" where one rank was run alone); and bounds that the target declares: the
    # most units unsharded at once, reductions of a unit a step: {"unsharded": 4, "reductions": 1}.
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
    # Ranks that hold the shards, what gradients are divided by before they are reduced, and whether
    # its full weights stay where they are over the border of a step.
    OpKind.UNIT: {"ranks": _LIST, "divisor": _INT, "kept": _BOOL},
    # Whether autograd is running: a forward hook seen then belongs to a recomputation.
    OpKind.HOOK: {"in_backward": _BOOL},
}

OPTIONAL_OF: Final[dict[OpKind, dict[str, tuple[type, ...]]]] = {
    op: {**({"chunk": _INT} if "unit" in FIELDS[op] else {}), **_OPTIONAL_OF.get(op, {})}
    for op in OpKind
}
"""Fields that records of one operation may carry.

Those about a unit may say in which model chunk it is; without that it is chunk 0.
"""

_ALLOWED: Final = {op: {**FIELDS[op], **OPTIONAL, **OPTIONAL_OF[op]} for op in OpKind}


_LARGEST: Final = 2**63 - 1

_SIGNED: Final = frozenset({"priority", "version", *OPTIONAL})
"""Numbers that may be negative; all others count something or are ids."""

_LISTS_OF: Final[dict[str, type]] = {
    "reads": int,
    "writes": int,
    "ranks": int,
    "shape": int,
    "names": str,
    "present": str,
    "missing": str,
}


def upgraded(record: dict[str, object], version: int) -> dict[str, object]:
    """Returns a record of an older schema as one of this one. What does not fit stays as it is."""
    if version != 2 or "op" not in record:
        return record
    if record["op"] == OpKind.HEADER:
        return {**record, "schema": SCHEMA_VERSION}
    if record["op"] == OpKind.NAME and isinstance(record.get("name"), str):
        unit, _, kind = str(record["name"]).partition(":")
        split = {"name": {"unit": unit, "kind": kind}}
        fields = (split.get(name, {name: value}) for name, value in record.items())
        return {name: value for field in fields for name, value in field.items()}
    return record


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
    allowed = _ALLOWED[op]
    for name in FIELDS[op]:
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
                f"Expected {wanted} in field {name!r} of a {op} record, got {_short(value)}."
            )
        better = _what_belongs(name, value)
        if better is not None:
            raise ValueError(
                f"Expected {better} in field {name!r} of a {op} record, got {_short(value)}."
            )


def _what_belongs(name: str, value: object) -> str | None:
    """Returns what a field of the right type should hold instead, or None if it is right."""
    if type(value) is int:
        if name in _SIGNED:
            return None if abs(value) <= _LARGEST else "an integer of 64 bits"
        least = 1 if name in ("world_size", "divisor") else 0
        if not least <= value <= _LARGEST:
            return f"an integer of at least {least} and below 2**63"
    elif type(value) is list:
        return _what_list_belongs(name, value)
    elif type(value) is dict:
        return _what_settings_belong(name, value)
    return None


def _what_list_belongs(name: str, value: list[object]) -> str | None:
    if name == "shapes":
        return None if all(map(_is_shape, value)) else 'shapes like ["bf16", 64, 32]'
    if _LISTS_OF[name] is str:
        return None if all(type(entry) is str for entry in value) else "a list of texts"
    if name == "ranks" and not value:
        return "at least one rank"
    return None if all(map(_is_count, value)) else "a list of numbers from 0"


def _what_settings_belong(name: str, value: dict[str, object]) -> str | None:
    if name == "bounds":
        return None if all(map(_is_count, value.values())) else "numbers from 0"
    for entry in value.values():
        entries = entry if type(entry) is list else [entry]
        if any(type(one) in (list, dict) for one in entries):
            return "settings that are no deeper than a list"
    wrong = [key for key in COUNTS if key in value and not _is_positive(value[key])]
    return f"a number from 1 as {wrong[0]!r}" if wrong else None


COUNTS: Final = ("num_microbatches", "expert_model_parallel_size")
"""Settings of a scenario that readers count with."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_shape(value: object) -> bool:
    return (
        type(value) is list
        and len(value) > 0
        and type(value[0]) is str
        and all(map(_is_count, value[1:]))
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST: Final = 80
"""Characters of a wrong value that a message shows."""
