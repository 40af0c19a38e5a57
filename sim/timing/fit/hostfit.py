"""Makes host costs of raw measurements: what is left of each node when its calls are taken off.

[Note: host costs] A trace of the same small model says which calls each node makes. Calls that were
timed alone have their costs; the rest of a node's time is the node's own cost, Python of Megatron
and Transformer Engine for the most part. A kernel launched by autograd costs what a layer more adds
to the backward of the plain schedule. One of our hooks costs what nodes take longer under MFSDP
than without it, and nodes of delayed weight gradients cost all that is added with them. What lies
outside of all nodes goes to the first node of a microbatch and, as far as it grows with the layers,
to the first of a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from real.trace.recorder import Record
from sim.timing.fit.measured import Content, source_of

OUTSIDE: Final = "step"
"""Key of what is inside no node."""

_UNIT_CALLS: Final = {
    "unshard gathered": "unshard",
    "unshard noop": "unshard_noop",
    "reshard": "reshard",
    "reduce": "reduce",
    "reduce last": "reduce_last",
}
_CALLS: Final = {
    "kernel": "kernel_new",
    "event_record": "event_record",
    "event_wait": "event_wait",
    "stream_wait": "stream_wait",
    "record_stream": "record_stream",
}
_FOUND: Final = ("kernel_backward", "hook")
"""Costs that no call alone shows."""

_OWN_RECORDS: Final = frozenset(
    {"node", "node_end", "unshard", "reshard", "reduce", "allocate", "free", "name", "unit"}
)
"""Records that cost nothing by themselves here: they are what is looked for, or bookkeeping."""

FIRST_OF_MICROBATCH: Final = ("pre_process forward", "model backward", "sharded model backward")
FIRST_OF_LAYER: Final = (
    "pre_dispatch_computation forward",
    "layer forward",
    "sharded layer forward",
)


@dataclass(kw_only=True)
class Calls:
    """What happens directly inside all nodes of one key, in one step of one rank.

    Attributes:
        count: How many nodes.
        records: Number of records by operation; kernels of autograd are "kernel_backward".
    """

    count: int = 0
    records: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def count_calls(records: Sequence[Record]) -> dict[str, Calls]:
    """Returns what happens inside nodes by "name direction", and outside of all under `OUTSIDE`."""
    calls: dict[str, Calls] = defaultdict(Calls)
    calls[OUTSIDE].count = 1
    open_nodes = [OUTSIDE]
    for record in records:
        op = record["op"]
        if op == "node":
            open_nodes.append(f"{record['name']} {record['direction']}".strip())
            calls[open_nodes[-1]].count += 1
        elif op == "node_end":
            open_nodes.pop()
        elif op == "kernel" and record.get("backward"):
            calls[open_nodes[-1]].records["kernel_backward"] += 1
        else:
            calls[open_nodes[-1]].records[op] += 1
    return dict(calls)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A variant of a small model: what was measured, and what a trace of it holds.

    Attributes:
        variant: Its name.
        layers: Number of layers.
        microbatches: Number of microbatches.
        parts: Count, own and whole microseconds by key, as measured.
        calls: What happens inside, by key.
    """

    variant: str
    layers: int
    microbatches: int
    parts: Mapping[str, Mapping[str, float]]
    calls: Mapping[str, Calls]

    @property
    def keys(self) -> list[str]:
        """Keys of nodes, those of units and of what is outside left out."""
        return [k for k in self.parts if k in self.calls and k not in (*_UNIT_CALLS, OUTSIDE)]

    @property
    def is_hooked(self) -> bool:
        """Whether our hooks run in its nodes."""
        return any(calls.records.get("hook") for calls in self.calls.values())

    @property
    def is_delayed(self) -> bool:
        """Whether weight gradients have nodes of their own."""
        return any(key.endswith(" wgrad") for key in self.parts)

    def own_ns(self, key: str) -> float:
        """Returns the nanoseconds of one node without what is timed inside it."""
        return 1e3 * self.parts[key]["own_us"]


def host_costs(measured: Mapping[str, Any], timed: Sequence[Timed], base: Content) -> Content:
    """Returns a cost file's content with measured host costs.

    Args:
        measured: What `real calibrate` wrote.
        timed: The small models.
        base: The content to change.
    """
    source = source_of(measured)
    host = base["host"]
    timed_alone = _timed_alone(measured)
    for name, value in timed_alone.items():
        host[name] = {"value": round(value), "source": source}
    known = {
        name: float(leaf["value"])
        for name, leaf in host.items()
        if "value" in leaf and name not in ("node", *_FOUND)
    }
    nodes, found = _solve(timed, known)
    for name, value in found.items():
        host[name] = {"value": round(value), "source": source}
    for key, name in _UNIT_CALLS.items():
        extra = _left_over(timed, key, known | found)
        if extra is not None:
            host[name] = {"value": round(max(extra, 0.0)), "source": source}
    for key, value in _outside(timed, known | found).items():
        nodes[key] = nodes.get(key, 0.0) + value
    host["nodes"] = {
        key: {"value": round(max(value, 0.0)), "source": source}
        for key, value in sorted(nodes.items())
    }
    return base


def _timed_alone(measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns nanoseconds of the calls that were timed alone."""
    calls = measured.get("calls", {})
    known = {name: 1e3 * calls[call] for name, call in _CALLS.items() if call in calls}
    if "nvtx_push_pop" in calls:
        known["nvtx"] = 1e3 * calls["nvtx_push_pop"] / 2
    if "event_synchronize" in calls:
        known["host_sync"] = 1e3 * max(calls["event_synchronize"] - calls["event_record"], 0.0)
    collectives = measured.get("collective_calls", {})
    if collectives:
        known["collective"] = 1e3 * float(np.median(list(collectives.values())))
    return known


def _cost(calls: Calls, known: Mapping[str, float]) -> float:
    """Returns the nanoseconds of the calls inside one node, as far as they are known."""
    total = 0.0
    for op, count in calls.records.items():
        if op not in _OWN_RECORDS:
            name = "nvtx" if op.startswith("nvtx") else op
            total += count * known.get(name, 0.0)
    return total / max(calls.count, 1)


def _left_over(timed: Sequence[Timed], key: str, known: Mapping[str, float]) -> float | None:
    """Returns the median over all models of what a key's calls do not explain."""
    rests = [
        one.own_ns(key) - _cost(one.calls[key], known)
        for one in timed
        if key in one.parts and key in one.calls
    ]
    return float(np.median(rests)) if rests else None


def _solve(
    timed: Sequence[Timed], known: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the own cost of every node, and what a kernel of autograd and a hook of ours cost.

    One after another, each from the models that show it, so that whole steps come out right.
    """
    kernel_backward, nodes = _plain_backwards(timed, known)
    known = {**known, "kernel_backward": kernel_backward}
    rests: dict[str, list[float]] = defaultdict(list)
    for one in timed:
        for key in one.keys:
            if not one.is_hooked and key not in nodes:
                rests[key].append(one.own_ns(key) - _cost(one.calls[key], known))
    nodes |= {key: max(float(np.median(values)), 0.0) for key, values in rests.items()}
    hook = _per_record("hook", [one for one in timed if not one.is_delayed], nodes, known)
    known["hook"] = hook
    nodes |= _delayed(timed, nodes, known)
    return nodes, {"kernel_backward": kernel_backward, "hook": hook}


def _plain_backwards(
    timed: Sequence[Timed], known: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Returns what a kernel of autograd costs, and what the backward of a microbatch does beside.

    Models of different numbers of layers tell the two apart.
    """
    names = ("model backward", "sharded model backward")
    rows, targets = [], []
    for one in timed:
        for place, name in enumerate(names):
            if name in one.keys:
                calls = one.calls[name]
                row = [0.0, 0.0, calls.records["kernel_backward"] / calls.count]
                row[place] = 1.0
                rows.append(row)
                targets.append(one.own_ns(name) - _cost(calls, known))
    if not rows:
        return known.get("kernel", 0.0), {}
    *rests, kernel_backward = least_squares(np.array(rows), np.array(targets)).tolist()
    return kernel_backward, dict(zip(names, rests, strict=True))


def _unexplained(one: Timed, nodes: Mapping[str, float], known: Mapping[str, float]) -> float:
    """Returns the nanoseconds of a model's nodes, those with a cost, that their costs lack."""
    return sum(
        one.calls[key].count * (one.own_ns(key) - nodes[key] - _cost(one.calls[key], known))
        for key in one.keys
        if key in nodes
    )


def _per_record(
    op: str, timed: Sequence[Timed], nodes: Mapping[str, float], known: Mapping[str, float]
) -> float:
    """Returns what a kind of record costs if it explains all that is unexplained."""
    total, count = 0.0, 0
    for one in timed:
        number = sum(one.calls[key].records.get(op, 0) for key in one.keys if key in nodes)
        if number:
            total += _unexplained(one, nodes, known)
            count += number
    return max(total / count, 0.0) if count else 0.0


def _delayed(
    timed: Sequence[Timed], nodes: Mapping[str, float], known: Mapping[str, float]
) -> dict[str, float]:
    """Returns the cost of nodes of delayed weight gradients: all that these models take longer."""
    rests: dict[str, list[float]] = defaultdict(list)
    for one in timed:
        new = [key for key in one.keys if key not in nodes]
        number = sum(one.calls[key].count for key in new)
        share = _unexplained(one, nodes, known) / number if number else 0.0
        for key in new:
            rests[key].append(one.own_ns(key) - _cost(one.calls[key], known) + share)
    return {key: max(float(np.median(values)), 0.0) for key, values in rests.items()}


def least_squares(matrix: np.ndarray, target: np.ndarray, rounds: int = 3000) -> np.ndarray:
    """Returns the vector without negative entries that comes closest, by coordinate descent."""
    gram, right = matrix.T @ matrix, matrix.T @ target
    solution = np.zeros(len(right))
    for _ in range(rounds):
        for i in range(len(right)):
            if gram[i, i] > 0:
                step = (right[i] - gram[i] @ solution) / gram[i, i]
                solution[i] = max(solution[i] + step, 0.0)
    return solution


def _outside(timed: Sequence[Timed], known: Mapping[str, float]) -> dict[str, float]:
    """Returns what to add to the first node of a microbatch, and to the first of a layer."""
    added: dict[str, float] = {}
    for microbatch, layer in zip(FIRST_OF_MICROBATCH, FIRST_OF_LAYER, strict=True):
        rows, targets = [], []
        for one in timed:
            if microbatch in one.parts and OUTSIDE in one.parts:
                rest = one.own_ns(OUTSIDE) - _cost(one.calls[OUTSIDE], known)
                rows.append([1.0, one.layers])
                targets.append(rest / one.microbatches)
        if rows:
            found = least_squares(np.array(rows), np.array(targets))
            added[microbatch], added[layer] = float(found[0]), float(found[1])
    return added
