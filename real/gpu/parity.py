"""Trains a scenario and its reference on GPUs and compares them."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from real.config import Scenario
from real.gpu.world import gpu_world
from real.reference import Reference, check_reference
from real.result import RunResult, judge
from real.targets import RELEASED, Hosted, Target, find_target

if TYPE_CHECKING:
    from real.output import JobOutput

_OnProgress = Callable[[str], None]


def run_parity(
    scenario: Scenario,
    reference: Reference,
    *,
    on_progress: _OnProgress,
    hosted: Hosted = RELEASED,
) -> RunResult | None:
    """Runs both jobs on this rank; returns the comparison of this rank's own parameters.

    Every rank compares its own gradients and weights; rank 0 gets the worst over all ranks, the
    others None. Losses are equal on all ranks.

    Args:
        scenario: The run.
        reference: What it is compared with.
        on_progress: Called after each step with what has ended.
        hosted: The target that is compared, and of which Megatron.
    """
    check_reference(scenario, reference)
    with gpu_world(scenario, tree=hosted.tree, targets=[hosted.target]) as rank:
        from real.mcore.observe import recorded_nodes

        target = find_target(hosted.target)
        started = time.perf_counter()
        with recorded_nodes(target.points()):
            output = _train(target, scenario, on_progress)
            gc.collect()
            torch.cuda.empty_cache()
            expected = _train_reference(target, scenario, reference, on_progress)
        mine = judge(
            [output],
            [expected],
            num_records=0,
            wall_s=time.perf_counter() - started,
            trace=None,
            ranks=[rank],
            reference=reference,
        )
        gathered: list[RunResult | None] = [None] * scenario.world_size
        torch.distributed.all_gather_object(gathered, mine)
    if rank != 0:
        return None
    worst = mine.worst_of([result for result in gathered if result is not None])
    return dataclasses.replace(worst, target=target.title)


def _train(target: Target, scenario: Scenario, on_progress: _OnProgress) -> JobOutput:
    from real.mcore.jobs import run_job

    return run_job(
        target.build(scenario),
        scenario,
        on_step=lambda step: on_progress(f"step {step} of the scenario"),
    )


def _train_reference(
    target: Target, scenario: Scenario, reference: Reference, on_progress: _OnProgress
) -> JobOutput:
    from real.mcore.jobs import run_job

    if reference is Reference.PLAIN:
        compared, job = scenario, target.reference(scenario)
    else:
        from real.mcore.distopt import make_reference

        compared = _without_hybrid(scenario)
        job = make_reference(compared, reference)
    return run_job(job, compared, on_step=lambda step: on_progress(f"step {step} of the reference"))


def _without_hybrid(scenario: Scenario) -> Scenario:
    """Returns the scenario on a mesh of one axis, and makes its groups.

    Without FSDP a hybrid mesh has no meaning, and its groups would mislead DDP.
    """
    from megatron.core import parallel_state

    from real.mcore.model import initialize_parallel

    plain = scenario.changed(num_distributed_optimizer_instances=1)
    if plain != scenario:
        parallel_state.destroy_model_parallel()
        initialize_parallel(plain)
    return plain
