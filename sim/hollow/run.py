"""Runs steps of a scenario on fake ranks for their records alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real.config import Scenario
from real.trace import OpKind, Recorder, Sink, active_recorder, recording
from real.variants import part_name
from sim.cuda import FakeDevice, use_device
from sim.cuda.device import active_device
from sim.cuda.shapes import ShapeRecorder
from sim.hollow.mode import REAL_FLOATS, HollowMode
from sim.hollow.routing import Routing
from sim.megatron import megatron_on_fake_cuda, rank_state

Progress = Callable[[str], None]
_Watcher = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class ShapesResult:
    """What a run for shapes leaves beside its trace: losses and gradients mean nothing.

    Attributes:
        num_records: Of all ranks.
        wall_s: Seconds, imports excluded.
        trace: Folder of the trace, or None.
    """

    num_records: int
    wall_s: float
    trace: Path | None


@dataclass(frozen=True, kw_only=True)
class ShapesRun:
    """How a run for shapes differs from an ordinary one.

    Attributes:
        is_reference: Run the model without FSDP, under the scenario's schedule.
        steps: Number of steps; the first has work that later ones do not repeat.
        routing: Chooses experts.
        is_hollow: Leave arithmetic out; False to compare with a run that does it.
        real_floats: Largest number of elements of a floating-point tensor with values.
        marks_units: Also record begin and end of MFSDP's own work on a unit, as nodes such as
            "unshard gathered": for the calibration of host times.
    """

    is_reference: bool = False
    steps: int = 1
    routing: Routing = field(default_factory=Routing)
    is_hollow: bool = True
    real_floats: int = REAL_FLOATS
    marks_units: bool = False


def run_for_shapes(
    scenario: Scenario,
    options: ShapesRun,
    *,
    sinks: Sequence[Sink | None] = (),
    out: Path | None = None,
    replay: str = "",
    progress: Progress = lambda _: None,
) -> ShapesResult:
    """Runs forward and backward of a scenario on all ranks, without arithmetic.

    Records are those of an ordinary run with kernels and their shapes.

    Args:
        scenario: The run.
        options: What is left out.
        sinks: Where each rank's records go.
        out: The folder that the sinks write to, for the result.
        replay: The command that repeats this run, for messages.
        progress: Shown one line of text now and then.

    Raises:
        WorldError: A rank failed or the ranks do not agree.
    """
    sinks = sinks or [None] * scenario.world_size
    with ExitStack() as stack:
        for sink in sinks:
            if sink is not None:
                stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda())
        from real.mcore import internals
        from real.mcore.observe import recorded_nodes
        from sim.world import World

        started = time.perf_counter()
        gc.freeze()
        stack.callback(gc.unfreeze)

        def body(rank: int) -> int:
            return _run_rank(scenario, options, rank, sinks[rank], progress)

        world = World(scenario.world_size, state=rank_state(), replay=replay)
        stack.enter_context(recorded_nodes())
        begin, end = _named(scenario, options)
        stack.enter_context(internals.watched_backwards(begin, end))
        if options.marks_units:
            stack.enter_context(internals.watched_units(_begin, _end))
        counts = world.run(body)
        wall_s = time.perf_counter() - started
    return ShapesResult(num_records=sum(counts), wall_s=wall_s, trace=out)


def _run_rank(
    scenario: Scenario, options: ShapesRun, rank: int, sink: Sink | None, progress: Progress
) -> int:
    from real.mcore import internals, watch_table
    from real.mcore.model import initialize_parallel
    from sim.world import init_process_group

    recorder = Recorder(sink)
    recorder.header(rank=rank, world_size=scenario.world_size, scenario=scenario.as_dict())
    with ExitStack() as stack:
        device = stack.enter_context(use_device(FakeDevice(rank, recorder)))
        stack.enter_context(recording(recorder))
        init_process_group(rank, scenario.world_size)
        if options.is_hollow:
            stack.enter_context(HollowMode(options.routing, real_floats=options.real_floats))
        initialize_parallel(scenario)
        job = _make_job(scenario, options)
        if not options.is_reference:
            watch_table.describe(job.model, device.storage_id)
        begin, end = _named(scenario, options)
        stack.enter_context(internals.watched_layers(job.model.module, begin, end))
        stack.enter_context(internals.watched_finalize(job.model.config, _begin, _end))
        stack.enter_context(ShapeRecorder(device))
        for step in range(options.steps):
            recorder.begin_step(step)
            job.forward_backward(step)
            recorder.record(OpKind.STEP, step=step, event="end")
            job.clear_gradients()
            if rank == 0:
                progress(f"shapes: step {step + 1} of {options.steps}")
        num_records = recorder.num_records
        recorder.close()
    return num_records


def _named(scenario: Scenario, options: ShapesRun) -> tuple[_Watcher, _Watcher]:
    """Returns what records a layer or a backward under the name that the timing model knows."""
    kind = {
        "is_overlapped": scenario.overlap_moe_expert_parallel_comm,
        "is_sharded": not options.is_reference,
    }

    def begin(name: str, direction: str) -> None:
        _begin(*part_name(f"{name} {direction}", **kind).rsplit(" ", 1))

    def end(name: str, direction: str) -> None:
        _end(*part_name(f"{name} {direction}", **kind).rsplit(" ", 1))

    return begin, end


def _begin(name: str, direction: str, unit: str | None = None) -> None:
    """Records a layer or a backward of the plain schedule, or work on a unit, as a node."""
    active_recorder().record(
        OpKind.NODE,
        name=name,
        direction=direction,
        layer=unit,
        microbatch=None,
        chunk=0,
        phase=None,
        stream=active_device().current_stream().stream_id,
    )


def _end(name: str, direction: str, unit: str | None = None) -> None:
    active_recorder().record(OpKind.NODE_END, name=name, direction=direction)


def _make_job(scenario: Scenario, options: ShapesRun) -> Any:
    from real.mcore.jobs import FsdpJob, ReferenceJob

    if options.is_reference:
        is_overlapped = scenario.overlap_moe_expert_parallel_comm
        return ReferenceJob(scenario, is_overlapped=is_overlapped)
    return FsdpJob(scenario)
