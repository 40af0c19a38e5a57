"""Makes the small models of a calibration come out as long as they were measured.

Costs of single calls and nodes, each found by itself, do not add up to a step: a node is slower in
one model than in another, and a rank that is late shows in whichever node waits for it. So each
group of costs that a variant adds gets one factor, with which a replay of that variant takes as
long as the variant did. Costs keep their relations inside a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from real.trace import Trace
from sim.timing.costs.costfile import Cluster
from sim.timing.costs.model import CostModel
from sim.timing.fit.measured import Content
from sim.timing.replay.fold import replay_folded

_PLAIN: Final = ("layer forward", "model backward")
_LIMITS: Final = (0.25, 4.0)
_HALVINGS: Final = 12


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A small model that was timed.

    Attributes:
        variant: Its name, of `real.variants.MAIN_VARIANTS`.
        traces: All ranks.
        step_ns: How long its step took.
    """

    variant: str
    traces: Sequence[Trace]
    step_ns: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Costs that a variant adds to those before it.

    Attributes:
        variant: The variant that shows them.
        calls: Names of host calls.
        has_node: Says of a node whether it belongs to the group.
    """

    variant: str
    calls: tuple[str, ...] = ()
    has_node: Callable[[str], bool] = lambda _: False

    def scale(self, cluster: Cluster, factor: float) -> Cluster:
        """Returns the cluster with this group's costs scaled."""
        return replace(
            cluster,
            host={
                name: cost * factor if name in self.calls else cost
                for name, cost in cluster.host.items()
            },
            host_node={
                node: cost * factor if self.has_node(node) else cost
                for node, cost in cluster.host_node.items()
            },
        )


def _is_of_combined_schedule(node: str) -> bool:
    is_other = node in _PLAIN or node.startswith("sharded ") or node.endswith(" wgrad")
    return not is_other and node != "finalize step"


_GROUPS: Final = (
    _Group(variant="no_fsdp_plain", has_node=lambda node: node in _PLAIN),
    _Group(variant="no_fsdp_combined", has_node=_is_of_combined_schedule),
    _Group(variant="mfsdp_plain", has_node=lambda node: node.startswith("sharded ")),
    _Group(variant="mfsdp_combined", calls=("hook",)),
    _Group(variant="mfsdp_combined_dw", has_node=lambda node: node.endswith(" wgrad")),
)
"""In this order: each takes what the ones before it have found."""


def reconcile(content: Content, cluster: Cluster, models: Sequence[SmallModel]) -> None:
    """Scales the host costs of a content, and says so beside each.

    Args:
        content: A cost file's content; changed.
        cluster: What it holds.
        models: What was timed; groups of variants that are missing stay as they are, and so do
            those that no factor between a quarter and four brings there.
    """
    for group in _GROUPS:
        shown = [model for model in models if model.variant == group.variant]
        if not shown:
            continue
        factor = _factor(group, cluster, shown)
        if factor is None:
            continue
        cluster = group.scale(cluster, factor)
        for leaf in _leaves(group, content["host"]):
            leaf["value"] = round(leaf["value"] * factor)
            leaf["source"] += f"; times {factor:.3f} for whole steps of small models"


def _leaves(group: _Group, host: Content) -> Iterator[dict[str, Any]]:
    yield from (host[name] for name in group.calls)
    nodes: Mapping[str, dict[str, Any]] = host["nodes"]
    yield from (leaf for node, leaf in nodes.items() if group.has_node(node))


def _factor(group: _Group, cluster: Cluster, models: Sequence[SmallModel]) -> float | None:
    """Returns the factor with which steps are as long as measured, in their geometric mean."""

    def is_too_long(factor: float) -> bool:
        costs = CostModel(group.scale(cluster, factor))
        ratios = (
            replay_folded(model.traces, costs).replay.step_ns / model.step_ns for model in models
        )
        return sum(map(math.log, ratios)) > 0

    low, high = _LIMITS
    if is_too_long(low) or not is_too_long(high):
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if is_too_long(middle):
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)
