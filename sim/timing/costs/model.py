"""The cost model: nanoseconds of everything in a trace, from a cost file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from real.trace.recorder import Record
from sim.timing.costs.collectives import Placement, collective_ns, place
from sim.timing.costs.costfile import Cluster, CostError, Curve, cluster_names, load_cluster
from sim.timing.costs.kernels import Shape, Work, variant_of, work_of

__all__ = ["Cluster", "CostError", "CostModel", "cluster_names", "load_cluster"]

_SAME: Final = {
    "kernel": "kernel",
    "collective": "collective",
    "collective_wait": "collective_wait",
    "event_record": "event_record",
    "event_wait": "event_wait",
    "stream_wait": "stream_wait",
    "host_sync": "host_sync",
    "record_stream": "record_stream",
    "resize": "resize",
    "allocate": "allocate",
    "free": "free",
    "hook": "hook",
    "reshard": "reshard",
    "fence": "fence",
    "optimizer_step": "optimizer_step",
    "grad_read": "grad_read",
    "nvtx_push": "nvtx",
    "nvtx_pop": "nvtx",
}


class CostModel:
    """Answers what each record costs. Answers of kernels are remembered by name and shapes.

    Args:
        cluster: What a cost file says.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._kernels: dict[Any, int] = {}
        self._placements: dict[tuple[int, ...], Placement] = {}

    # -- host -------------------------------------------------------------------------------

    def host_ns(self, record: Record) -> float:
        """Returns what the host spends on a record itself, nested records left out."""
        cluster, op = self.cluster, record["op"]
        if op == "kernel":
            own = cluster.host_kernel.get(record["name"])
            if own is not None:
                return own
            return cluster.host["kernel_backward" if record.get("backward") else "kernel"]
        if op == "node":
            own = cluster.host_node.get(f"{record['name']} {record['direction']}")
            return cluster.host["node"] if own is None else own
        if op == "unshard":
            return cluster.host["unshard" if record["gathered"] else "unshard_noop"]
        if op == "reduce":
            return cluster.host["reduce_last" if record["last"] else "reduce"]
        name = _SAME.get(op)
        return 0 if name is None else cluster.host[name]

    # -- device -----------------------------------------------------------------------------

    def kernel_ns(self, name: str, shapes: Sequence[Shape]) -> int:
        """Returns the time of a kernel that has the device for itself; 0 if it launches nothing."""
        key = (name, tuple(map(tuple, shapes)))
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels[key] = self._timed(name, shapes)
        return known

    def _timed(self, name: str, shapes: Sequence[Shape]) -> int:
        work = work_of(name, shapes)
        curves = self.cluster.kernel_efficiency
        return self.work_ns(work, curves.get(variant_of(name, shapes), curves.get(name)))

    def work_ns(self, work: Work, curve: Curve | None = None) -> int:
        """Returns the time of some work: the longer of computing and moving, or the floor.

        Args:
            work: What is done.
            curve: Its efficiency; None takes that of its class.
        """
        if not work.kind:
            return 0
        cluster = self.cluster
        if curve is None:
            curve = cluster.efficiency[work.kind]
        if work.flops:
            rate = self._flops_per_ns(work.dtype) * curve.at(work.flops)
            moving = work.num_bytes / cluster.memory_bandwidth_gbs
            busy = max(work.flops / rate, moving)
        elif work.num_bytes:
            busy = work.num_bytes / (cluster.memory_bandwidth_gbs * curve.at(work.num_bytes))
        else:
            busy = 0.0
        return round(max(busy, cluster.kernel_floor_ns))

    def _flops_per_ns(self, dtype: str) -> float:
        rates = self.cluster.tflops
        rate = rates.get(dtype)
        if rate is None:
            rate = rates["bfloat16"] if dtype in ("float16",) else rates["float32"]
        return rate * 1e3

    def copy_ns(self, num_bytes: int) -> int:
        """Returns the time of a copy inside the device."""
        return self.work_ns(Work("copy", 0.0, 2.0 * num_bytes, "uint8"))

    # -- network ----------------------------------------------------------------------------

    def placement(self, ranks: Sequence[int]) -> Placement:
        """Returns where a group's ranks are."""
        key = tuple(ranks)
        known = self._placements.get(key)
        if known is None:
            known = self._placements[key] = place(key, self.cluster.ranks_per_node)
        return known

    def collective_ns(self, kind: str, num_bytes: int, placement: Placement) -> int:
        """Returns the time of a collective from when all ranks are there, alone on its links."""
        return collective_ns(self.cluster, kind, num_bytes, placement)
