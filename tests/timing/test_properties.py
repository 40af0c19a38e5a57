"""What holds for every program: seeded loops over random ones."""

import random

import pytest
from records import layer_trace
from stories import Story, collective

from sim.timing.costs.costfile import load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.engine import Times, run_program
from sim.timing.replay.fold import fold
from sim.timing.replay.program import COLLECTIVE, KERNEL, RECORD, WAIT, Program
from sim.timing.replay.timeline import replay

SEEDS = range(25)
CLUSTER = load_cluster("h200-x2")


def random_program(seed: int, *, launch: float = 1.0, network: float = 1.0) -> Program:
    """Returns two ranks with kernels on one stream, and collectives on two others."""
    draw = random.Random(seed)
    launch_ns = round(draw.choice([0, 20, 200]) * launch)
    stories = [Story(rank, launch_ns) for rank in range(2)]
    specs = []
    for mark in range(40):
        choice = draw.random()
        kernel = [draw.randrange(1, 300) for _ in stories]
        if choice < 0.45:
            for story, ns in zip(stories, kernel, strict=True):
                story.kernel(0, ns)
        elif choice < 0.7:
            stream = draw.choice([1, 2])
            ns = round(draw.randrange(50, 400) * network)
            specs.append(collective([0, 1], ns, communicator=f"c{stream}"))
            specs[-1].tiers = (f"link {stream}",)
            for story in stories:
                story.collective(stream, len(specs) - 1)
        else:
            first, second = draw.sample([0, 1, 2], 2)
            for story in stories:
                story.record(first, mark)
                story.wait(second, mark)
                if choice > 0.93:
                    story.sync(mark)
    return Program(ranks=[story.program for story in stories], collectives=specs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cheaper_launch_is_never_slower(seed: int) -> None:
    ends = [run_program(random_program(seed, launch=f)).end for f in (0.0, 0.5, 1.0, 3.0)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faster_network_is_never_slower(seed: int) -> None:
    ends = [run_program(random_program(seed, network=f)).end for f in (0.0, 0.5, 1.0, 3.0)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("seed", SEEDS)
def test_contention_is_never_faster(seed: int) -> None:
    ends = []
    for slowdown in (1.0, 1.2, 2.0):
        program = random_program(seed)
        program.compute_slowdown = slowdown
        ends.append(run_program(program).end)
    assert ends == sorted(ends)


def check_order(program: Program, times: Times) -> None:
    """Checks that nothing runs before what it waits for."""
    for each, rank in zip(program.ranks, times.ranks, strict=True):
        done = {}
        for stream, ops in each.streams.items():
            spans = rank.streams[stream]
            before = 0
            for op, start, end in zip(ops, spans.starts, spans.ends, strict=True):
                assert before <= start <= end
                before = end
                if op[0] == RECORD:
                    done[op[3]] = end
                if op[0] <= COLLECTIVE:
                    assert start >= rank.bases[op[1]] + op[2]
                if op[0] == KERNEL:
                    assert end - start >= op[3]
        for stream, ops in each.streams.items():
            for op, end in zip(ops, rank.streams[stream].ends, strict=True):
                assert op[0] != WAIT or end >= done[op[3]]
        for segment, base, following in zip(
            each.segments, rank.host_ends, rank.bases[1:], strict=False
        ):
            assert following == max([base, *(done[mark] for mark in segment.waits)])
    for spec, begin, end in zip(program.collectives, times.begins, times.ends, strict=True):
        assert end - begin >= spec.work_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_runs_before_what_it_waits_for(seed: int) -> None:
    program = random_program(seed)
    program.compute_slowdown, program.communication_slowdown = 1.2, 1.1
    check_order(program, run_program(program))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_does_no_more_work_than_time_allows(seed: int) -> None:
    program = random_program(seed)
    for each in program.ranks:
        work = sum(op[3] for ops in each.streams.values() for op in ops if op[0] == KERNEL)
        assert run_program(program).end >= work


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_the_same_every_time(seed: int) -> None:
    assert run_program(random_program(seed)) == run_program(random_program(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_folding_keeps_the_end(seed: int) -> None:
    program = random_program(seed)
    assert run_program(fold(program)[0]).end == run_program(program).end


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 8.0])
def test_real_traces_get_no_slower_with_bandwidth_and_no_faster_with_host_cost(
    factor: float,
) -> None:
    traces = layer_trace(2)

    def end(bandwidth: float = 1.0, host: float = 1.0) -> int:
        return replay(traces, CostModel(CLUSTER.scaled(bandwidth=bandwidth, host=host))).step_ns

    assert end(bandwidth=2 * factor) <= end(bandwidth=factor)
    assert end(host=2 * factor) >= end(host=factor)
