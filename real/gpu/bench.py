"""Times steps of one or more variants of a scenario on GPUs, interleaved."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from real.config import Scenario
from real.gpu.world import gpu_world


def run_bench(
    variants: Mapping[str, Scenario], *, repeats: int, warmup: int = 2
) -> dict[str, dict[str, Any]]:
    """Times the variants by turns and returns milliseconds and bytes by variant.

    A variant's name that starts with "no_fsdp" is the reference job under the variant's schedule.
    All variants are built first and stay in memory, so that each repeat compares like with like;
    the peak memory of each is that of its own steps, with the others' weights taken off.

    Args:
        variants: Scenarios of equal parallel sizes.
        repeats: Timed steps of each variant.
        warmup: Steps before.
    """
    from real.mcore.jobs import FsdpJob, Job, ReferenceJob

    first = next(iter(variants.values()))
    with gpu_world(first):
        jobs: dict[str, Job] = {
            name: ReferenceJob(s, is_overlapped=s.overlap_moe_expert_parallel_comm)
            if name.startswith("no_fsdp")
            else FsdpJob(s)
            for name, s in variants.items()
        }
        times: dict[str, list[float]] = {name: [] for name in jobs}
        peaks: dict[str, int] = {}
        gc.collect()
        gc.disable()
        for repeat in range(warmup + repeats):
            for name, job in jobs.items():
                torch.cuda.synchronize()
                torch.distributed.barrier()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                started = time.perf_counter()
                job.forward_backward(repeat)
                torch.cuda.synchronize()
                elapsed = 1e3 * (time.perf_counter() - started)
                if repeat >= warmup:
                    times[name].append(elapsed)
                    peaks[name] = torch.cuda.max_memory_allocated() - before
                job.clear_gradients()
            gc.collect()
        gc.enable()
    return {
        name: {
            "step_ms": round(statistics.median(values), 2),
            "min_ms": round(min(values), 2),
            "max_ms": round(max(values), 2),
            "peak_bytes_above_rest": peaks[name],
        }
        for name, values in times.items()
    }
