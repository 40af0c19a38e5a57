"""How long a collective takes once all ranks are there, alone on its links.

A latency, and the bytes that each rank sends over what it can send of them in a nanosecond. Of a
group that spans nodes, the part that stays inside a node and the part that leaves it move at the
same time, so the slower decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sim.timing.costs.costfile import Cluster, Link

_ALL_TO_ALL: Final = frozenset({"all_to_all", "all_to_all_single"})


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a group are.

    Attributes:
        num_ranks: Size of the group.
        num_nodes: Nodes that it spans.
        per_node: Most ranks of it on one node.
    """

    num_ranks: int
    num_nodes: int
    per_node: int

    @property
    def tiers(self) -> tuple[str, ...]:
        """The links that it uses."""
        inside = ("node",) if self.per_node > 1 else ()
        return (*inside, "network") if self.num_nodes > 1 else inside


def place(ranks: Sequence[int], ranks_per_node: int) -> Placement:
    """Returns where the ranks of a group are, when nodes are filled in the order of the ranks."""
    nodes: dict[int, int] = {}
    for rank in ranks:
        node = rank // ranks_per_node
        nodes[node] = nodes.get(node, 0) + 1
    return Placement(num_ranks=len(ranks), num_nodes=len(nodes), per_node=max(nodes.values()))


def is_all_to_all(kind: str) -> bool:
    """Whether each rank sends something else to each other rank."""
    return kind in _ALL_TO_ALL


def collective_ns(cluster: Cluster, kind: str, num_bytes: int, placement: Placement) -> int:
    """Returns the nanoseconds of one collective.

    Args:
        cluster: The links.
        kind: Its name in a trace.
        num_bytes: Bytes that a rank gives; of an all-to-all, what the busiest rank gives or gets.
        placement: Where the ranks are.
    """
    ranks = placement.num_ranks
    if ranks == 1:
        return 0
    whole = num_bytes * ranks if kind in ("all_gather", "gather") else num_bytes
    if kind == "all_reduce":
        whole *= 2
    traffic = "all_to_all" if kind in _ALL_TO_ALL else "ring"
    inside, outside = _bytes_by_tier(traffic, whole, placement)
    worst = 0.0
    if placement.per_node > 1:
        worst = max(worst, _tier_ns(cluster.links["node"], traffic, inside, placement.per_node))
    if placement.num_nodes > 1:
        network = cluster.links["network"]
        worst = max(worst, _tier_ns(network, traffic, outside, placement.num_nodes))
    return round(worst)


def _bytes_by_tier(traffic: str, whole: float, placement: Placement) -> tuple[float, float]:
    """Returns what the busiest rank sends inside its node and out of it."""
    ranks, here = placement.num_ranks, placement.per_node
    away = ranks - here
    if traffic == "all_to_all":
        return whole * (here - 1) / ranks, whole * away / ranks
    # Every rank of a node brings in its part of what is not on the node, and passes it on inside.
    return whole * (ranks - 1) / ranks, whole * away / ranks / here


def _tier_ns(link: Link, traffic: str, num_bytes: float, size: int) -> float:
    latency = link.latency_ns + link.hop_ns * math.log2(size)
    if num_bytes <= 0:
        return latency
    rate = link.bandwidth_gbs * link.efficiency[traffic].at(num_bytes)
    return latency + num_bytes / rate
