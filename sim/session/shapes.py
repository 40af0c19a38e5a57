"""Runs steps of a scenario on fake ranks for their records alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.config import Scenario
from real.trace import OpKind, Sink, active_recorder
from real.variants import part_name
from sim.cuda.device import active_device
from sim.cuda.shapes import ShapeRecorder
from sim.hollow.mode import REAL_FLOATS, HollowMode
from sim.hollow.routing import Routing
from sim.session.megatron import frozen_imports, megatron_on_fake_cuda
from sim.session.options import Progress, no_progress
from sim.session.rank import rank_scope
from sim.session.sinks import begin_trace
from sim.session.subject import MFSDP2, Subject
from sim.session.world import WorldOptions, make_world

if TYPE_CHECKING:
    from real.mcore.jobs import Job

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
        tree: The Megatron tree to run, put before all others; None for the installed one.
        replay: The command that repeats this run, for messages.
    """

    is_reference: bool = False
    steps: int = 1
    routing: Routing = field(default_factory=Routing)
    is_hollow: bool = True
    real_floats: int = REAL_FLOATS
    marks_units: bool = False
    tree: Path | None = None
    replay: str = ""


def run_for_shapes(
    scenario: Scenario,
    options: ShapesRun,
    *,
    sinks: Sequence[Sink | None] = (),
    out: Path | None = None,
    progress: Progress = no_progress,
) -> ShapesResult:
    """Runs forward and backward of a scenario on all ranks, without arithmetic.

    Records are those of an ordinary run with kernels and their shapes.

    Args:
        scenario: The run.
        options: What is left out.
        sinks: Where each rank's records go.
        out: The folder that the sinks write to, for the result.
        progress: Shown one line of text now and then.

    Raises:
        WorldError: A rank failed or the ranks do not agree.
    """
    sinks = sinks or [None] * scenario.world_size
    with ExitStack() as stack:
        for sink in sinks:
            if sink is not None:
                stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda(options.tree))
        started = time.perf_counter()
        stack.enter_context(frozen_imports())
        stack.enter_context(_watched(scenario, options))

        def body(rank: int) -> int:
            shown = progress if rank == 0 else no_progress
            return _run_rank(scenario, options, rank, sinks[rank], shown)

        world = make_world(scenario.world_size, WorldOptions(replay=options.replay))
        counts = world.run(body)
        wall_s = time.perf_counter() - started
    return ShapesResult(num_records=sum(counts), wall_s=wall_s, trace=out)


@contextmanager
def _watched(scenario: Scenario, options: ShapesRun) -> Iterator[None]:
    """Records nodes, and what stands for them where the schedule has none."""
    from real.mcore import internals

    with ExitStack() as stack:
        stack.enter_context(MFSDP2.watching())
        stack.enter_context(internals.watched_backwards(*_named(scenario, options)))
        if options.marks_units:
            stack.enter_context(internals.watched_units(_begin, _end))
        yield


def _run_rank(
    scenario: Scenario, options: ShapesRun, rank: int, sink: Sink | None, progress: Progress
) -> int:
    from real.mcore import internals
    from real.mcore.model import initialize_parallel

    recorder = begin_trace(sink, rank, scenario.world_size, scenario)
    with rank_scope(rank, scenario.world_size, recorder) as device, ExitStack() as stack:
        if options.is_hollow:
            stack.enter_context(HollowMode(options.routing, real_floats=options.real_floats))
        initialize_parallel(scenario)
        subject = _subject(options)
        job: Any = subject.make_job(scenario)
        subject.describe(job, device.storage_id)
        begin, end = _named(scenario, options)
        stack.enter_context(internals.watched_layers(job.model.module, begin, end))
        stack.enter_context(internals.watched_finalize(job.model.config, _begin, _end))
        stack.enter_context(ShapeRecorder(device))
        for step in range(options.steps):
            recorder.begin_step(step)
            job.forward_backward(step)
            recorder.record(OpKind.STEP, step=step, event="end")
            job.clear_gradients()
            progress(f"shapes: step {step + 1} of {options.steps}")
        return recorder.num_records


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


def _subject(options: ShapesRun) -> Subject:
    return (
        Subject(name="reference", make_job=_make_overlapped_reference)
        if options.is_reference
        else MFSDP2
    )


def _make_overlapped_reference(scenario: Scenario) -> Job:
    """Builds the model without FSDP, under the scenario's schedule."""
    from real.mcore.jobs import ReferenceJob

    return ReferenceJob(scenario, is_overlapped=scenario.overlap_moe_expert_parallel_comm)
