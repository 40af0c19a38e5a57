"""What one fake rank does: set up, train, hand back numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from real.config import Scenario
from real.trace import Recorder, Sink, recording
from sim.cuda import FakeDevice, use_device
from sim.cuda.kernels import KernelRecorder
from sim.cuda.shapes import ShapeRecorder
from sim.session.options import BUILD, Progress, no_progress
from sim.session.sinks import begin_trace
from sim.session.subject import MFSDP2, Subject
from sim.world import init_process_group

if TYPE_CHECKING:
    from real.output import JobOutput


@contextmanager
def rank_scope(rank: int, world_size: int, recorder: Recorder) -> Iterator[FakeDevice]:
    """Makes the calling thread a rank with a device of its own and torch.distributed up.

    The trace ends with the block, unless an error ends it.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        recorder: Takes its records; the header is written (`begin_trace`).
    """
    with use_device(FakeDevice(rank, recorder)) as device, recording(recorder):
        init_process_group(rank, world_size)
        yield device
        recorder.close()


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What every rank does.

    Attributes:
        subject: What is trained.
        kernel_steps: Steps in which kernels are recorded with what they read and write; `BUILD`
            for the building of the model.
        records_shapes: Also record the shapes of what they read and write.
    """

    subject: Subject = MFSDP2
    kernel_steps: Collection[int] = ()
    records_shapes: bool = False


def run_rank(
    scenario: Scenario,
    plan: RankPlan,
    rank: int,
    *,
    sink: Sink | None,
    progress: Progress = no_progress,
) -> JobOutput:
    """Trains one rank of a scenario on its own fake device.

    Args:
        scenario: The run.
        plan: What is done beside training.
        rank: This rank.
        sink: Where the trace goes, or None.
        progress: Shown each step.
    """
    from real.mcore.jobs import run_job
    from real.mcore.model import initialize_parallel

    subject = plan.subject
    recorder = begin_trace(sink, rank, scenario.world_size, scenario, **subject.identity())
    with rank_scope(rank, scenario.world_size, recorder) as device:
        adapted = subject.adapt(scenario)
        initialize_parallel(adapted)

        def on_step(step: int) -> None:
            progress(f"{subject.label}: step {step + 1} of {scenario.train_iters}")

        def around_step(step: int) -> AbstractContextManager[object]:
            if step not in plan.kernel_steps:
                return nullcontext()
            return ShapeRecorder(device) if plan.records_shapes else KernelRecorder(device)

        with around_step(BUILD):
            job = subject.make_job(adapted)
        subject.describe(job, device.storage_id)
        return run_job(job, adapted, on_step=on_step, around_step=around_step)
