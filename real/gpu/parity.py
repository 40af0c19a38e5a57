"""Trains a scenario and its reference on GPUs and compares them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from real.config import Scenario
from real.gpu.world import gpu_world
from real.reference import Reference, check_reference
from real.result import RunResult, judge


def run_parity(
    scenario: Scenario, reference: Reference, *, on_progress: Callable[[str], None]
) -> RunResult | None:
    """Runs both jobs on this rank; returns the comparison of this rank's own parameters.

    Every rank compares its own gradients and weights; rank 0 gets the worst over all ranks, the
    others None. Losses are equal on all ranks.

    Args:
        scenario: The run.
        reference: What it is compared with.
        on_progress: Called after each step with what has ended.
    """
    check_reference(scenario, reference)
    with gpu_world(scenario) as rank:
        from megatron.core import parallel_state

        from real.mcore.distopt import make_reference
        from real.mcore.jobs import FsdpJob, run_job
        from real.mcore.model import initialize_parallel
        from real.mcore.observe import recorded_nodes

        started = time.perf_counter()
        with recorded_nodes():
            output = run_job(
                FsdpJob(scenario),
                scenario,
                on_step=lambda step: on_progress(f"step {step} of the scenario"),
            )
            gc.collect()
            torch.cuda.empty_cache()
            plain = scenario.changed(num_distributed_optimizer_instances=1)
            if plain != scenario:
                # Without FSDP a hybrid mesh has no meaning, and its groups would mislead DDP.
                parallel_state.destroy_model_parallel()
                initialize_parallel(plain)
            expected = run_job(
                make_reference(plain, reference),
                plain,
                on_step=lambda step: on_progress(f"step {step} of the reference"),
            )
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
    return mine.worst_of([result for result in gathered if result is not None])
