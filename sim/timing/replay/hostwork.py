"""What the host spends on each record of a step, with the cost of schedule nodes spread over them.

A node's own cost is Python that runs between its launches. The device gets its work bit by bit
meanwhile, so the cost is spread evenly: before each launch of the node, and after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from real.trace.recorder import Record
from sim.timing.costs.model import CostModel

_LAUNCHES: Final = ("kernel", "collective")


class HostWork(NamedTuple):
    """What the host spends on one record, in nanoseconds.

    Attributes:
        own: On the record itself.
        node: Its part of the node that it is in.
    """

    own: float
    node: float


@dataclass(slots=True)
class _OpenNode:
    """A node that has begun.

    Attributes:
        cost: All that it costs.
        launches: Places of the launches directly inside.
    """

    cost: float
    launches: list[int]


def host_work(records: Sequence[Record], model: CostModel) -> list[HostWork]:
    """Returns the host's work for each record of a step.

    Args:
        records: Those of one rank, in order.
        model: What they cost.
    """
    own = [0.0 if record["op"] == "node" else model.host_ns(record) for record in records]
    shares = [0.0] * len(records)
    nodes: list[_OpenNode] = []
    for place, record in enumerate(records):
        op = record["op"]
        if op == "node":
            nodes.append(_OpenNode(model.host_ns(record), []))
        elif op == "node_end" and nodes:
            _spread(nodes.pop(), place, shares)
        elif op in _LAUNCHES and nodes:
            nodes[-1].launches.append(place)
    for node in nodes:  # a step that ends inside
        _spread(node, len(records) - 1, shares)
    return [HostWork(*both) for both in zip(own, shares, strict=True)]


def _spread(node: _OpenNode, end: int, shares: list[float]) -> None:
    places = [*node.launches, end]
    for place in places:
        shares[place] += node.cost / len(places)
