"""What one fake rank does in a scenario: set up, train, hand back numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from real.config import Scenario
from real.reference import Reference
from real.targets import find_target
from real.trace import Recorder, Sink, recording
from sim.cuda import FakeDevice, use_device
from sim.cuda.kernels import KernelRecorder
from sim.cuda.shapes import ShapeRecorder
from sim.hosting import RELEASE, Hosted

if TYPE_CHECKING:
    from real.mcore.jobs import JobOutput


def run_rank(
    scenario: Scenario,
    rank: int,
    *,
    is_reference: bool,
    sink: Sink | None,
    start: Callable[[int, int], None],
    on_step: Callable[[int], None] | None = None,
    kernel_steps: Collection[int] = (),
    records_shapes: bool = False,
    reference: Reference = Reference.DDP,
    hosted: Hosted = RELEASE,
) -> JobOutput:
    """Trains one rank of a scenario on its own fake device.

    Args:
        scenario: The run.
        rank: This rank.
        is_reference: Train the reference instead of the model under MFSDP v2.
        sink: Where the trace goes, or None.
        start: Starts torch.distributed, given rank and world size.
        on_step: Called after each step with its number.
        kernel_steps: Steps in which kernels are recorded with what they read and write.
        records_shapes: Also record the shapes of what they read and write.
        reference: Which reference, with `is_reference`.
        hosted: What is under test.
    """
    from real.mcore.distopt import make_reference
    from real.mcore.jobs import Job, run_job
    from real.mcore.model import initialize_parallel

    target = find_target(hosted.target)
    recorder = Recorder(sink)
    recorder.header(
        rank=rank,
        world_size=scenario.world_size,
        scenario=scenario.as_dict(),
        **hosted.identity(),
    )
    with ExitStack() as stack:
        device = stack.enter_context(use_device(FakeDevice(rank, recorder)))
        stack.enter_context(recording(recorder))
        start(rank, scenario.world_size)
        if is_reference and reference is not Reference.PLAIN:
            # Without FSDP a hybrid mesh has no meaning, and the groups of one would mislead DDP.
            scenario = scenario.changed(num_distributed_optimizer_instances=1)
        initialize_parallel(scenario)
        if not is_reference:
            job: Job = target.build(scenario)
            target.describe(job, device.storage_id)
        elif reference is Reference.PLAIN:
            job = target.reference(scenario)
        else:
            job = make_reference(scenario, reference)

        def around_step(step: int) -> AbstractContextManager[object]:
            if step not in kernel_steps:
                return nullcontext()
            return ShapeRecorder(device) if records_shapes else KernelRecorder(device)

        outputs = run_job(job, scenario, on_step=on_step, around_step=around_step)
        recorder.close()
    return outputs
