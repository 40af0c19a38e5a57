"""From records to programs: what runs where, and what it waits for."""

import pytest
from records import Rank, layer_trace

from real.trace import Trace
from sim.timing.costs.costfile import HOST_CALLS, load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.lower import AS_RECORDED, Conditions
from sim.timing.replay.program import ReplayError
from sim.timing.replay.timeline import Replay, replay

CLUSTER = load_cluster("h200-x2")
FREE = CLUSTER.changed(
    host=dict.fromkeys(HOST_CALLS, 0.0),
    host_node={},
    host_kernel={},
    launch_latency_ns=0,
    compute_slowdown=1.0,
    communication_slowdown=1.0,
)
MODEL = CostModel(FREE)
KERNEL_NS = MODEL.kernel_ns("add", [["bf16", 1 << 20], ["bf16", 1 << 20]])


def run(*ranks: Rank, conditions: Conditions = AS_RECORDED, model: CostModel = MODEL) -> Replay:
    return replay([rank.trace() for rank in ranks], model, conditions=conditions)


def spans(found: Replay, rank: int = 0) -> list[tuple[int, int, int]]:
    return sorted((s.start, s.end, s.stream) for s in found.spans(rank))


def test_the_host_pays_for_each_call_before_its_kernel_starts() -> None:
    story = Rank()
    story.step()
    story.add("hook", point="pre_forward", module="m", unit="u")
    story.kernel()
    story.done()
    host = dict.fromkeys(HOST_CALLS, 0.0) | {"hook": 700.0, "kernel": 30.0}
    found = run(story, model=CostModel(FREE.changed(host=host, launch_latency_ns=5)))
    assert spans(found) == [(735, 735 + KERNEL_NS, 0)]


def test_nodes_and_kernels_may_have_costs_of_their_own() -> None:
    story = Rank()
    story.step()
    story.node("mlp", "forward")
    story.kernel(name="mul")
    story.done()
    model = CostModel(FREE.changed(host_node={"mlp forward": 11.0}, host_kernel={"mul": 4.0}))
    assert spans(run(story, model=model))[0][0] == 15


def test_a_node_is_paid_for_between_its_launches_and_after_the_last() -> None:
    """The device gets its work bit by bit; what is in an inner node is not the outer one's."""
    story = Rank()
    story.step()
    story.node("outer", "forward")
    story.kernel()
    story.node("inner", "forward")
    story.kernel()
    story.node_end("inner", "forward")
    story.kernel()
    story.node_end("outer", "forward")
    story.kernel()
    story.done()
    slow = KERNEL_NS * 10.0
    costs = {"outer forward": 3 * slow, "inner forward": 2 * slow}
    found = run(story, model=CostModel(FREE.changed(host_node=costs)))
    starts = [start / slow for start, _, _ in spans(found)]
    assert starts == pytest.approx([1, 2, 4, 5])
    assert [work.own + work.node for work in found.host_work[0]] == pytest.approx(
        [0, slow, 0, slow, slow, slow, slow, 0]
    )


def test_a_node_without_launches_is_paid_for_at_its_end() -> None:
    story = Rank()
    story.step()
    story.node("mlp", "forward")
    story.node_end("mlp", "forward")
    story.kernel()
    story.done()
    found = run(story, model=CostModel(FREE.changed(host_node={"mlp forward": 11.0})))
    assert spans(found)[0][0] == 11


def test_a_kernel_of_a_backward_has_its_own_launch_cost() -> None:
    story = Rank()
    story.step()
    story.records[story.kernel() - 1]["backward"] = True
    story.done()
    host = dict.fromkeys(HOST_CALLS, 0.0) | {"kernel": 30.0, "kernel_backward": 7.0}
    assert spans(run(story, model=CostModel(FREE.changed(host=host))))[0][0] == 7


def test_measured_times_of_kernels_win_over_the_model() -> None:
    story = Rank()
    story.step()
    story.records[story.kernel() - 1] |= {"start_ns": 1000, "end_ns": 1042}
    story.done()
    assert spans(run(story)) == [(0, 42, 0)]


def test_the_last_step_is_replayed_and_its_waits_for_earlier_ones_are_over() -> None:
    story = Rank()
    story.step(0)
    story.kernel()
    before = story.event_record(0, 1)
    story.done(0)
    story.step(1)
    story.event_wait(3, 1, before)
    story.kernel(3)
    story.done(1)
    assert spans(run(story)) == [(0, KERNEL_NS, 3)]
    first = replay([story.trace()], MODEL, step=0)
    assert spans(first) == [(0, KERNEL_NS, 0)]


def test_a_step_that_is_not_there_is_told() -> None:
    story = Rank()
    story.step(0)
    with pytest.raises(ReplayError, match="Expected a complete step in the trace of rank 0, got n"):
        run(story)
    story.done(0)
    with pytest.raises(ReplayError, match="Expected step 4 in the trace of rank 0, got 0"):
        replay([story.trace()], MODEL, step=4)


def test_a_wait_refers_to_the_record_that_was_newest_then() -> None:
    story = Rank()
    story.step()
    first = story.event_record(0, 1)
    story.kernel(0)
    story.event_record(0, 1)
    story.event_wait(3, 1, first)
    story.kernel(3)
    story.done()
    # The second record of the event is after the kernel; the wait is for the first.
    assert spans(run(story))[1][:2] == (0, 2 * KERNEL_NS)


def test_a_stream_wait_is_for_what_the_other_stream_has_so_far() -> None:
    story = Rank()
    story.step()
    story.kernel(0)
    story.add("stream_wait", stream=3, on=0)
    story.kernel(3)
    story.done()
    assert spans(run(story)) == [(0, KERNEL_NS, 0), (KERNEL_NS, 2 * KERNEL_NS, 3)]


@pytest.mark.parametrize("what", ["device", "stream", "event"])
def test_the_host_waits_for_what_it_asks_for(what: str) -> None:
    story = Rank()
    story.step()
    story.kernel(0)
    mark = story.event_record(0, 1)
    story.add("host_sync", what=what, on={"device": None, "stream": 0, "event": mark}[what])
    story.kernel(3)
    story.done()
    assert spans(run(story))[1] == (KERNEL_NS, 2 * KERNEL_NS, 3)


def test_an_asynchronous_collective_runs_beside_its_stream_until_it_is_waited_for() -> None:
    ranks = []
    for number in range(2):
        story = Rank(number, 2)
        story.group("g", 0, 1)
        story.step()
        story.collective("g", 0, stream=0, is_async=True)
        story.kernel(0)
        story.add("collective_wait", stream=0, group="g", n=0)
        story.kernel(0)
        story.done()
        ranks.append(story)
    found = run(*ranks)
    spec = found.times.program.collectives[0]
    assert spec.work_ns > KERNEL_NS
    assert spans(found) == [
        (0, KERNEL_NS, 0),
        (0, spec.work_ns, -1),
        (spec.work_ns, spec.work_ns + KERNEL_NS, 0),
    ]


def test_a_collective_of_one_rank_is_a_copy() -> None:
    story = Rank()
    story.group("g", 0)
    story.step()
    story.collective("g", 0)
    story.done()
    assert spans(run(story)) == [(0, MODEL.copy_ns(1 << 24), 2)]


def test_an_all_to_all_takes_what_the_busiest_rank_gives_or_gets() -> None:
    times = []
    for got in (1 << 20, 1 << 24):
        ranks = []
        for number in range(2):
            story = Rank(number, 2)
            story.group("g", 0, 1)
            story.step()
            story.add("allocate", stream=4, storage=6, bytes=got if number else 1 << 20)
            story.collective("g", 0, "all_to_all_single", num_bytes=1 << 20)
            story.done()
            ranks.append(story)
        times.append(run(*ranks).step_ns)
    assert times[1] > 2 * times[0]


def test_messages_between_two_ranks_are_refused() -> None:
    story = Rank()
    story.group("g", 0)
    story.step()
    story.collective("g", 0, "send")
    story.done()
    with pytest.raises(ReplayError, match="got a send in record 3 of rank 0"):
        run(story)


def test_kernels_without_shapes_are_told_with_the_command_that_records_them() -> None:
    story = Rank()
    story.step()
    del story.records[story.kernel() - 1]["shapes"]
    story.done()
    with pytest.raises(ReplayError, match="sim run --shapes-only"):
        run(story)


# -- conditions -------------------------------------------------------------------------------


def two_streams() -> Rank:
    """A stream that waits, and another one that need not."""
    story = Rank()
    story.step()
    story.kernel(0)
    mark = story.event_record(0, 1)
    story.event_wait(3, 1, mark)
    story.kernel(3)
    story.kernel(4)
    story.done()
    return story


def test_with_a_queue_for_each_stream_nothing_else_waits() -> None:
    found = run(two_streams())
    assert next(span.start for span in found.spans(0) if span.stream == 4) == 0


def test_one_hardware_queue_starts_work_in_host_order() -> None:
    found = run(two_streams(), conditions=Conditions(connections=1))
    # Stream 4 waits for nothing, but it is behind stream 3's wait in the queue.
    assert next(span.start for span in found.spans(0) if span.stream == 4) == KERNEL_NS


def test_one_hardware_queue_still_runs_kernels_beside_each_other() -> None:
    story = Rank()
    story.step()
    story.kernel(0)
    story.kernel(3)
    story.done()
    found = run(story, conditions=Conditions(connections=1))
    assert [start for start, _, _ in spans(found)] == [0, 0]


def test_a_full_queue_holds_the_host_back() -> None:
    story = Rank()
    story.step()
    for _ in range(16):
        story.kernel(0)
    story.done()
    free = run(story)
    held = run(story, conditions=Conditions(queue_depth=4))
    assert free.times.ranks[0].end == 0
    assert held.times.ranks[0].end == 12 * KERNEL_NS
    assert free.step_ns == held.step_ns


def test_a_straggler_makes_the_others_wait() -> None:
    traces = layer_trace(2)
    base = replay(traces, MODEL)
    slow = replay(traces, MODEL, conditions=Conditions(straggler=1.5, straggler_rank=1))
    assert base.step_ns < slow.step_ns <= 1.5 * base.step_ns


def test_imbalance_gives_one_rank_more_to_do_and_the_others_less() -> None:
    traces = layer_trace(2)
    base = replay(traces, MODEL)
    skewed = replay(traces, MODEL, conditions=Conditions(imbalance=1.5))

    def work(found: Replay, rank: int) -> int:
        return sum(op[3] for op in found.times.program.ranks[rank].streams[0] if op[0] == 0)

    assert work(skewed, 0) > work(base, 0) == work(base, 1) > work(skewed, 1)
    assert work(skewed, 0) + work(skewed, 1) == pytest.approx(2 * work(base, 0), abs=10)


def test_equal_traces_give_equal_times() -> None:
    def once() -> list[tuple[int, int, int]]:
        traces: list[Trace] = layer_trace(4)
        return spans(replay(traces, CostModel(CLUSTER)))

    assert len({tuple(once()) for _ in range(5)}) == 1
