"""Times steps of one or more variants of a scenario on GPUs, interleaved."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from real.config import Scenario
from real.gpu.host import rotated, time_hooks_and_units
from real.gpu.jobs import make_job
from real.gpu.loopback import Seat
from real.gpu.world import gpu_world
from real.targets import DEFAULT, RELEASED, Hosted
from real.variants import target_of

if TYPE_CHECKING:
    from real.mcore.jobs import Job

Results = dict[str, dict[str, Any]]


def run_bench(
    scenario: Scenario,
    variants: Sequence[str],
    *,
    repeats: int,
    hosted: Hosted = RELEASED,
    seat: Seat | None = None,
    warmup: int = 2,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Times variants by turns and returns milliseconds, bytes and host costs by variant.

    All variants are built first and stay in memory, so that each repeat compares like with like;
    the peak memory of each is that of its own steps, with the others' weights taken off.

    Args:
        scenario: What is varied.
        variants: Names of `real.variants.VARIANTS`.
        repeats: Timed steps of each variant.
        hosted: Which Megatron, and the target whose own variant holds.
        seat: The rank that this process stands for, alone; None for one that torchrun launched.
        warmup: Steps before.
        on_progress: Called after each model is built and after each step, with what has ended.
    """
    with gpu_world(scenario, seat, tree=hosted.tree, targets=_targets(variants, hosted)):
        return _time_variants(
            scenario,
            variants,
            repeats=repeats,
            hosted=hosted,
            seat=seat,
            warmup=warmup,
            on_progress=on_progress,
        )


def run_grid(
    scenarios: Mapping[str, Scenario],
    variants: Sequence[str],
    *,
    repeats: int,
    report: Callable[[str, Results], None],
    hosted: Hosted = RELEASED,
    seat: Seat | None = None,
    rounds: int = 1,
    warmup: int = 2,
    on_progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Times the variants of several scenarios of equal parallel sizes, one scenario at a time.

    A host's speed drifts over minutes, so several rounds tell more than as many steps in one.

    Args:
        scenarios: By name.
        variants: Names of `real.variants.VARIANTS`.
        repeats: Timed steps of each variant in each round.
        report: Gets the results of each scenario, of all rounds so far, as soon as they are there.
        hosted: Which Megatron, and the target whose own variant holds.
        seat: The rank that this process stands for, alone; None for one that torchrun launched.
        rounds: Visits to each scenario; its models are built anew each time.
        warmup: Steps before.
        on_progress: Called after each model is built and after each step, with what has ended.
    """
    first = next(iter(scenarios.values()))
    with gpu_world(first, seat, tree=hosted.tree, targets=_targets(variants, hosted)):
        known: dict[str, Results] = {}
        for _ in range(rounds):
            for name, scenario in scenarios.items():
                found = _time_variants(
                    scenario,
                    variants,
                    repeats=repeats,
                    hosted=hosted,
                    seat=seat,
                    warmup=warmup,
                    on_progress=on_progress,
                )
                known[name] = _merged(known[name], found) if name in known else found
                report(name, known[name])
                gc.collect()
                torch.cuda.empty_cache()


def _time_variants(
    scenario: Scenario,
    variants: Sequence[str],
    *,
    repeats: int,
    hosted: Hosted,
    seat: Seat | None,
    warmup: int,
    on_progress: Callable[[str], None],
) -> Results:
    started = time.perf_counter()
    jobs: dict[str, Job] = {}
    rest: dict[str, int] = {}
    for name in variants:
        gc.collect()
        before = torch.cuda.memory_allocated()
        jobs[name] = make_job(scenario, name, hosted.target, seat)
        gc.collect()
        rest[name] = torch.cuda.memory_allocated() - before
        on_progress(f"the making of {name}")
    built_s = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in jobs}
    peaks: dict[str, int] = {}
    gc.disable()
    try:
        for repeat in range(warmup + repeats):
            order = rotated(list(jobs), repeat)
            gc.collect()
            # Collecting gives memory back; whoever runs next takes it again, page by page.
            _time_step(jobs[order[0]], repeat)
            for name in order:
                elapsed, peak = _time_step(jobs[name], repeat)
                on_progress(f"step {repeat} of {name}")
                if repeat >= warmup:
                    times[name].append(elapsed)
                    peaks[name] = peak
        host = {
            name: _host_costs(job, warmup + repeats)
            for name, job in jobs.items()
            if target_of(name) == DEFAULT
        }
    finally:
        gc.enable()
    by_rank = [peaks] if seat is not None else _by_rank(peaks)
    for job in jobs.values():
        job.release()
    return {
        name: {
            "world_size": torch.distributed.get_world_size(),
            **_summary(values),
            "peak_bytes_above_rest": peaks[name],
            "peak_bytes_by_rank": [found[name] for found in by_rank],
            "rest_bytes": rest[name],
            "host": host.get(name, {}),  # our hooks; another target has none
            **_identity(name, hosted),
            "built_s": round(built_s, 1),
            **({} if seat is None else seat.as_dict()),
        }
        for name, values in times.items()
    }


def _targets(variants: Sequence[str], hosted: Hosted) -> list[str]:
    """Returns the targets that train some variants, each once."""
    names = [target_of(variant, hosted.target) for variant in variants]
    return [name for name in dict.fromkeys(names) if name is not None]


def _identity(variant: str, hosted: Hosted) -> dict[str, Any]:
    """Says which target of which Megatron a variant is; nothing of what the release has."""
    target = target_of(variant, hosted.target)
    return {} if target is None else Hosted(target, hosted.tree).identity()


def _by_rank(peaks: dict[str, int]) -> list[dict[str, int]]:
    """Returns what each rank of the job has found."""
    found: list[dict[str, int]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, peaks)
    return found


def _host_costs(job: Job, step: int) -> dict[str, dict[str, float]]:
    """Returns what our hooks and MFSDP's units cost the host in one more step."""
    found = time_hooks_and_units(lambda: job.forward_backward(step))
    torch.cuda.synchronize()
    job.clear_gradients()
    return found


def _summary(milliseconds: Sequence[float]) -> dict[str, Any]:
    return {
        "step_ms": round(statistics.median(milliseconds), 2),
        "min_ms": round(min(milliseconds), 2),
        "max_ms": round(max(milliseconds), 2),
        "all_ms": [round(value, 2) for value in milliseconds],
    }


def _merged(first: Results, second: Results) -> Results:
    """Returns the results of two rounds together; memory is that of the second."""
    return {
        name: {**found, **_summary([*first[name]["all_ms"], *found["all_ms"]])}
        for name, found in second.items()
    }


def _time_step(job: Job, step: int) -> tuple[float, int]:
    """Returns the milliseconds of forward and backward, and the peak bytes above rest."""
    torch.cuda.synchronize()
    torch.distributed.barrier()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    job.forward_backward(step)
    torch.cuda.synchronize()
    elapsed = 1e3 * (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - before
    job.clear_gradients()
    return elapsed, peak
