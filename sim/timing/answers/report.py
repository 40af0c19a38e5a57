"""What `sim time` says of a replay: plain data, and the same as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from real.trace import Trace
from sim.timing.answers.breakdown import RankBreakdown, break_down, summary
from sim.timing.costs.costfile import Cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.critical import by_kind, critical_path, lane_share
from sim.timing.replay.fold import replay_folded
from sim.timing.replay.memory import memory_timeline
from sim.timing.replay.timeline import Replay

NUM_ITEMS: Final = 10
"""Items of the critical path that are shown."""


def report(
    traces: Sequence[Trace],
    cluster: Cluster,
    *,
    step: int | None = None,
    num_ranks: int | None = None,
) -> dict[str, Any]:
    """Returns what a replay of one step found.

    Raises:
        ReplayError: The trace lacks what a replay needs.
    """
    folded = replay_folded(traces, CostModel(cluster), step=step, num_ranks=num_ranks)
    replay = folded.replay
    ranks = [break_down(replay, index) for index in range(len(replay.times.ranks))]
    slowest = _slowest(replay)
    path = critical_path(replay)
    memory = [memory_timeline(replay, index) for index in range(len(replay.times.ranks))]
    band = cluster.step_error
    numbers = summary(ranks, replay.step_ns)
    return {
        "cluster": cluster.name,
        "is_measured": cluster.is_measured(),
        "ranks": folded.num_ranks,
        "timed_ranks": len(ranks),
        "operations": replay.times.program.num_ops,
        **numbers,
        "step_ms_band": [numbers["step_ms"] * (1 - band), numbers["step_ms"] * (1 + band)],
        "host_bound": lane_share(path, "host"),
        "peak_bytes": max(found.peak_bytes for found in memory),
        "peak_reserved_bytes": max(found.peak_reserved_bytes for found in memory),
        "peak_gathered_bytes": max(found.peak_gathered_bytes for found in memory),
        "rank": ranks[slowest].rank,
        "streams": _streams(ranks[slowest]),
        "critical_path": [
            {"lane": group.lane, "what": group.what, "ms": group.ns / 1e6, "items": group.num_items}
            for group in by_kind(path)[:NUM_ITEMS]
        ],
    }


def _slowest(replay: Replay) -> int:
    ends = [
        max([rank.end, *(spans.ends[-1] for spans in rank.streams.values() if spans.ends)])
        for rank in replay.times.ranks
    ]
    return ends.index(max(ends))


def _streams(rank: RankBreakdown) -> list[dict[str, Any]]:
    return [
        {
            "stream": stream.stream,
            "role": stream.role,
            "compute_ms": stream.compute_ns / 1e6,
            "comm_ms": stream.comm_ns / 1e6,
            "idle_ms": stream.idle_ns / 1e6,
        }
        for stream in rank.streams
    ]


def text(result: dict[str, Any]) -> str:
    """Returns a report for readers."""

    def gib(name: str) -> str:
        return f"{result[name] / 2**30:10.2f} GiB"

    low, high = result["step_ms_band"]
    for_host = f"{result['host_idle_ms']:.2f} of it waiting for the host"
    kind = "measured" if result["is_measured"] else "published figures, not measured"
    folded = (
        ""
        if result["ranks"] == result["timed_ranks"]
        else (f", {result['timed_ranks']} timed in place of all")
    )
    lines = [
        f"{result['cluster']} ({kind}), {result['ranks']} ranks{folded}",
        f"step                    {result['step_ms']:10.2f} ms   ({low:.1f} to {high:.1f})",
        f"compute                 {result['compute_ms']:10.2f} ms   mean of ranks, as all below",
        f"communication           {result['comm_ms']:10.2f} ms   waiting for other ranks included",
        f"  exposed               {result['exposed_comm_ms']:10.2f} ms",
        f"  all-to-all hidden     {_percent(result['a2a_hidden'])}",
        f"  FSDP hidden           {_percent(result['fsdp_comm_hidden'])}",
        f"device idle             {result['idle_ms']:10.2f} ms   {for_host}",
        f"host on critical path   {_percent(result['host_bound'])}",
        f"peak memory             {gib('peak_bytes')}  allocated since recording began",
        f"  reserved              {gib('peak_reserved_bytes')}",
        f"  gathered parameters   {gib('peak_gathered_bytes')}",
        "",
        f"streams of rank {result['rank']}     compute ms    comm ms    idle ms",
    ]
    lines += [
        f"  {stream['stream']:3d} {stream['role']:<16s}{stream['compute_ms']:10.2f} "
        f"{stream['comm_ms']:10.2f} {stream['idle_ms']:10.2f}"
        for stream in result["streams"]
    ]
    lines += ["", "critical path, largest items"]
    lines += [
        f"  {item['ms']:10.2f} ms  {item['lane']:<14s} {item['what']} ({item['items']})"
        for item in result["critical_path"]
    ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "      none" if share is None else f"{100 * share:10.1f} %"
