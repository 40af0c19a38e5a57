"""The critical path covers the step without gaps, and names what to shorten."""

import itertools

import pytest
from records import Rank, layer_trace

from sim.timing.answers.breakdown import break_down, hidden_share
from sim.timing.costs.costfile import load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.critical import by_kind, critical_path, lane_share
from sim.timing.replay.intervals import overlap, total, union
from sim.timing.replay.lower import AS_RECORDED, Conditions
from sim.timing.replay.timeline import Replay, replay

CLUSTER = load_cluster("h200-x2")


def assert_covers_the_step(found: Replay) -> None:
    path = critical_path(found)
    assert path[0].start == 0
    assert path[-1].end == found.step_ns
    assert all(a.end == b.start for a, b in itertools.pairwise(path))


@pytest.mark.parametrize("host", [0.0, 1.0, 20.0])
@pytest.mark.parametrize(
    "conditions",
    [
        AS_RECORDED,
        Conditions(straggler=2.0, straggler_rank=3),
        Conditions(connections=1),
        Conditions(queue_depth=2),
        Conditions(imbalance=2.0),
    ],
)
def test_the_path_covers_the_step(host: float, conditions: Conditions) -> None:
    model = CostModel(CLUSTER.scaled(host=host))
    assert_covers_the_step(replay(layer_trace(4), model, conditions=conditions))


def test_a_step_that_the_host_limits_is_on_the_host() -> None:
    slow = replay(layer_trace(2), CostModel(CLUSTER.scaled(host=50.0)))
    fast = replay(layer_trace(2), CostModel(CLUSTER.scaled(host=0.0)))
    assert lane_share(critical_path(slow), "host") > 0.9
    assert lane_share(critical_path(fast), "host") < 0.05


def test_the_path_runs_through_the_straggler() -> None:
    conditions = Conditions(straggler=3.0, straggler_rank=2)
    model = CostModel(CLUSTER.scaled(host=0.0))
    path = critical_path(replay(layer_trace(4), model, conditions=conditions))
    busy = [item for item in path if item.lane == "compute"]
    assert {item.rank for item in busy} == {2}
    named = {group.what for group in by_kind(path) if group.lane == "compute"}
    assert named == {
        "mlp backward: elementwise",
        "mlp forward: elementwise",
        "pre_dispatch_computation backward: elementwise",
        "pre_dispatch_computation forward: elementwise",
    }


def test_the_path_goes_through_a_host_that_waits() -> None:
    story = Rank()
    story.step()
    for _ in range(3):
        story.kernel(elements=1 << 26)
        story.add("host_sync", what="stream", on=0)
    story.done()
    found = replay([story.trace()], CostModel(CLUSTER))
    assert_covers_the_step(found)
    lanes = [item.lane for item in critical_path(found)]
    assert lanes.count("compute") == 3
    assert found.times.ranks[0].end == found.step_ns


def test_each_stream_is_busy_or_idle_all_the_time() -> None:
    found = replay(layer_trace(2), CostModel(CLUSTER))
    rank = break_down(found, 0)
    assert [stream.role for stream in rank.streams] == [
        "all_gather", "compute", "all_to_all", "reduce_scatter",
    ]  # fmt: skip
    for stream in rank.streams:
        assert stream.compute_ns + stream.comm_ns + stream.idle_ns == found.step_ns
    assert rank.compute_ns + rank.exposed_comm_ns + rank.idle_ns == found.step_ns
    assert 0 <= rank.host_idle_ns <= rank.idle_ns


def test_communication_is_hidden_by_kernels_only() -> None:
    story = Rank()
    story.group("g", 0, 1)
    story.group("h", 0, 1)
    story.step()
    story.collective("g", 0)
    story.collective("h", 0, "all_to_all_single", stream=4, unit=None)
    story.done()
    other = Rank(1, 2)
    other.records = story.records
    rank = break_down(replay([story.trace(), other.trace()], CostModel(CLUSTER)), 0)
    assert rank.exposed_comm_ns == rank.comm_ns
    assert hidden_share(rank.a2a_ns, rank.exposed_a2a_ns) == 0.0
    assert hidden_share(rank.fsdp_ns, rank.exposed_fsdp_ns) == 0.0
    assert hidden_share(0, 0) is None


def test_intervals_join_and_overlap() -> None:
    first = union([(5, 9), (0, 3), (2, 4), (7, 7)])
    assert first == [(0, 4), (5, 9)]
    assert total(first) == 8
    assert overlap(first, [(3, 6), (8, 20)]) == 1 + 1 + 1
    assert overlap(first, []) == 0
