"""Trains scenarios on GPUs with our hooks and writes what each rank did, as the simulation does."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from real.config import Scenario, ScenarioError
from real.gpu.durations import DeviceTimes, HoldingSink
from real.gpu.observe import observed
from real.gpu.recorder import GpuRecorder
from real.gpu.world import gpu_world
from real.trace import JsonlSink, trace_path

if TYPE_CHECKING:
    from real.mcore.jobs import Job

_UNTIMED: Final = 2
"""Steps of each kind before any is timed."""


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """What one rank has recorded of one scenario.

    Attributes:
        num_records: Records in this rank's file.
        losses: One per recorded step.
        grad_norms: One per recorded step.
        plain_ms: Median time of forward and backward of a step that is not recorded, or None.
        recorded_ms: The same of a recorded one.
    """

    num_records: int
    losses: list[float]
    grad_norms: list[float]
    plain_ms: float | None = None
    recorded_ms: float | None = None

    @property
    def overhead(self) -> float | None:
        """How much longer a recorded step takes, as a fraction of one that is not."""
        if self.plain_ms is None or self.recorded_ms is None:
            return None
        return self.recorded_ms / self.plain_ms - 1

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        result: dict[str, Any] = {
            "num_records": self.num_records,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
        }
        if self.overhead is not None:
            result["plain_ms"] = self.plain_ms
            result["recorded_ms"] = self.recorded_ms
            result["overhead"] = round(self.overhead, 4)
        return result


def open_file(out: Path, rank: int, world_size: int) -> JsonlSink:
    """Opens the trace file of one rank; the first rank removes files of a larger, older world.

    Raises:
        ScenarioError: The folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            current = {trace_path(out, other) for other in range(world_size)}
            for old in set(out.glob("rank*.jsonl")) - current:
                old.unlink()
        return JsonlSink(trace_path(out, rank))
    except OSError as error:
        raise ScenarioError(
            f"Expected a folder to write to, got {out}: {error.strerror}."
        ) from None


def run_traces(
    scenarios: Mapping[Path, Scenario],
    *,
    num_warmup: int = 1,
    has_durations: bool = False,
    num_timed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[Path, TraceResult]:
    """Records every scenario on this rank, one after the other in one world of processes.

    Args:
        scenarios: What to train, by the folder that the trace goes to; of equal parallel sizes.
        num_warmup: Forwards and backwards that are not recorded, before the first step: libraries
            compile and choose kernels in the first one, and wait for the device meanwhile.
        has_durations: Also record when things were issued and run.
        num_timed: Steps to time with and without a record, by turns, after the trace is written.
        on_progress: Called after each recorded step with what has ended.
    """
    results: dict[Path, TraceResult] = {}
    with gpu_world(next(iter(scenarios.values()))) as rank:
        for out, scenario in scenarios.items():
            results[out] = _record(
                scenario,
                out,
                rank,
                num_warmup=num_warmup,
                has_durations=has_durations,
                num_timed=num_timed,
                on_progress=on_progress,
            )
            gc.collect()
            torch.cuda.empty_cache()
    return results


def _record(
    scenario: Scenario,
    out: Path,
    rank: int,
    *,
    num_warmup: int,
    has_durations: bool,
    num_timed: int,
    on_progress: Callable[[str], None],
) -> TraceResult:
    from real.mcore import watch_table
    from real.mcore.jobs import FsdpJob, run_job

    file = open_file(out, rank, scenario.world_size)
    with ExitStack() as stack:
        stack.callback(file.close)
        recorder = _recorder(file, has_durations=has_durations)
        recorder.header(rank=rank, world_size=scenario.world_size, scenario=scenario.as_dict())
        with _recorded(recorder):
            job = FsdpJob(scenario)
            watch_table.describe(job.model, recorder.storage_number)
        for _ in range(num_warmup):
            job.forward_backward(0)
            job.clear_gradients()
        with _recorded(recorder):
            output = run_job(
                job, scenario, on_step=lambda step: on_progress(f"step {step} of {out}")
            )
        recorder.close()
    times = _time_steps(job, scenario, out, num_timed) if num_timed else (None, None)
    return TraceResult(
        num_records=recorder.num_records,
        losses=[step.loss for step in output.steps],
        grad_norms=[step.grad_norm for step in output.steps],
        plain_ms=times[0],
        recorded_ms=times[1],
    )


def _recorder(file: JsonlSink, *, has_durations: bool) -> GpuRecorder:
    if not has_durations:
        return GpuRecorder(file)
    sink = HoldingSink(file)
    return GpuRecorder(sink, times=DeviceTimes(sink))


@contextmanager
def _recorded(recorder: GpuRecorder) -> Iterator[None]:
    from real.mcore.observe import recorded_nodes

    with recorded_nodes(), observed(recorder):
        yield


def _time_steps(job: Job, scenario: Scenario, out: Path, repeats: int) -> tuple[float, float]:
    """Returns median milliseconds of a step without and with a record, timed by turns."""
    path = out / f"timed{torch.distributed.get_rank():04d}.jsonl"
    recorder = GpuRecorder(JsonlSink(path))
    plain: list[float] = []
    recorded: list[float] = []
    gc.collect()
    gc.disable()
    for repeat in range(_UNTIMED + repeats):
        step = scenario.train_iters + repeat
        plain.append(_time(job, step))
        with _recorded(recorder):
            recorder.begin_step(step)
            recorded.append(_time(job, step))
        gc.collect()
    gc.enable()
    recorder.close()
    path.unlink()
    return statistics.median(plain[_UNTIMED:]), statistics.median(recorded[_UNTIMED:])


def _time(job: Job, step: int) -> float:
    torch.cuda.synchronize()
    torch.distributed.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    job.forward_backward(step)
    torch.cuda.synchronize()
    elapsed = 1e3 * (time.perf_counter() - started)
    job.clear_gradients()
    return elapsed
