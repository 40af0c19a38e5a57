"""A whole job of one rank whose peers are not there does what the simulation says it does."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

from real.config import Scenario, load_scenario
from real.gpu.recorder import GpuRecorder
from real.trace import MemorySink, Recorder, Trace
from sim.cuda import FakeDevice, use_device
from sim.diff import canonical_text
from tests.conformance.test_conformance import GOLDEN, differences
from tests.conformance.test_four_ranks import seen_from

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


def record_alone(scenario: Scenario, rank: int) -> Trace:
    """Runs the GPU job of one rank on a fake device, with loopback peers."""
    from sim.megatron import megatron_on_fake_cuda, rank_state
    from sim.quiet import quiet

    sink = MemorySink()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        quiet()
        stack.enter_context(megatron_on_fake_cuda())
        from sim.world import World

        def body(_: int) -> None:
            # A world of one, so that process-wide state is back to what it was at the end.
            with use_device(FakeDevice(0, Recorder())):
                run_alone(scenario, rank, sink)

        World(1, state=rank_state()).run(body)
    return Trace(
        rank=rank,
        world_size=scenario.world_size,
        scenario=scenario.as_dict(),
        records=sink.records[1:],
        is_complete=True,
    )


def run_alone(scenario: Scenario, rank: int, sink: MemorySink) -> None:
    from real.gpu.loopback import Seat, init_loopback
    from real.gpu.observe import observed
    from real.gpu.trace import name_storages
    from real.mcore.jobs import FsdpJob, run_job
    from real.mcore.model import initialize_parallel
    from real.mcore.observe import recorded_nodes

    init_loopback(Seat(rank, scenario.world_size))
    initialize_parallel(scenario)
    recorder = GpuRecorder(sink, priority=lambda _: 0)
    with recorded_nodes(), observed(recorder):
        recorder.header(rank=rank, world_size=scenario.world_size, scenario=scenario.as_dict())
        job = FsdpJob(scenario)
        name_storages(recorder, job.model.module)
        run_job(job, scenario)
        recorder.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("conformance/*.toml")))
def test_rank_0_of_2_alone_does_what_its_golden_trace_says(name: str) -> None:
    """The same hooks, units, nodes, calls and waits, in the same order."""
    trace = record_alone(load_scenario(CONFIGS / "conformance" / f"{name}.toml"), 0)
    assert differences((GOLDEN / f"{name}.txt").read_text(), trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_4_alone_does_what_its_golden_trace_says(rank: int) -> None:
    """Groups are those of its number."""
    name = "ep2-dp2-hybrid"
    trace = record_alone(load_scenario(CONFIGS / "four" / f"{name}.toml"), rank)
    golden = (GOLDEN / "four" / f"{name}.txt").read_text()
    assert differences(seen_from(rank, golden), trace) == []
    assert " in " in canonical_text(trace)
