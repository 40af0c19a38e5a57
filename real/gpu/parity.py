"""Trains a scenario and its reference on GPUs and compares them."""

from __future__ import annotations

import gc
import time

import torch

from real.config import Scenario
from real.gpu.world import gpu_world
from real.result import RunResult, judge


def run_parity(scenario: Scenario) -> RunResult | None:
    """Runs both jobs on this rank; returns the comparison of this rank's own parameters.

    Every rank compares its own gradients and weights; rank 0 gets the worst over all ranks, the
    others None. Losses are equal on all ranks.
    """
    from real.mcore.jobs import FsdpJob, ReferenceJob, run_job

    with gpu_world(scenario) as rank:
        started = time.perf_counter()
        output = run_job(FsdpJob(scenario), scenario)
        gc.collect()
        torch.cuda.empty_cache()
        reference = run_job(ReferenceJob(scenario), scenario)
        mine = judge(
            [output],
            [reference],
            num_records=0,
            wall_s=time.perf_counter() - started,
            trace=None,
            ranks=[rank],
        )
        gathered: list[RunResult | None] = [None] * scenario.world_size
        torch.distributed.all_gather_object(gathered, mine)
    if rank != 0:
        return None
    return mine.worst_of([result for result in gathered if result is not None])
