"""Trains scenarios on GPUs with our hooks and writes what each rank did, as the simulation does."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from real.config import Scenario, ScenarioError
from real.gpu.durations import DeviceTimes, HoldingSink
from real.gpu.loopback import BACKEND, LOSSES_MEAN_NOTHING, Seat, built_alone
from real.gpu.observe import observed
from real.gpu.recorder import GpuRecorder
from real.gpu.world import gpu_world
from real.targets import RELEASED, Hosted, Target, find_target
from real.trace import JsonlSink, trace_path

if TYPE_CHECKING:
    from real.mcore.jobs import Job
    from real.watch import Point

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
        seat: The rank that this process stood for, alone; None where its peers were there.
    """

    num_records: int
    losses: list[float]
    grad_norms: list[float]
    plain_ms: float | None = None
    recorded_ms: float | None = None
    seat: Seat | None = None

    @property
    def overhead(self) -> float | None:
        """How much longer a recorded step takes, as a fraction of one that is not."""
        if self.plain_ms is None or self.recorded_ms is None:
            return None
        return self.recorded_ms / self.plain_ms - 1

    def text(self) -> str:
        """Returns the result in one line."""
        if self.seat is not None:
            return f"{self.num_records} records of rank {self.seat.rank}, {LOSSES_MEAN_NOTHING}"
        losses = ", ".join(f"{loss:.8f}" for loss in self.losses)
        return f"{self.num_records} records a rank, losses {losses}"

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
        return result if self.seat is None else {**result, **self.seat.as_dict()}


def open_file(out: Path, rank: int, world_size: int, *, is_alone: bool = False) -> JsonlSink:
    """Opens the trace file of one rank; the first rank removes files of a larger, older world.

    Args:
        out: The folder.
        rank: This rank.
        world_size: Ranks of the job.
        is_alone: Remove the files of all other ranks: nobody else writes there.

    Raises:
        ScenarioError: The folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if rank == 0 or is_alone:
            others = [rank] if is_alone else range(world_size)
            current = {trace_path(out, other) for other in others}
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
    hosted: Hosted = RELEASED,
    seat: Seat | None = None,
    num_warmup: int = 1,
    has_durations: bool = False,
    num_timed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[Path, TraceResult]:
    """Records every scenario on this rank, one after the other in one world of processes.

    Args:
        scenarios: What to train, by the folder that the trace goes to; of equal parallel sizes.
        hosted: The target that trains them, and of which Megatron.
        seat: The rank that this process stands for, alone; None for one that torchrun launched.
        num_warmup: Forwards and backwards that are not recorded, before the first step: libraries
            compile and choose kernels in the first one, and wait for the device meanwhile. Those of
            a target whose first step is unlike the others run in a job of their own: not for every
            target, since each job makes streams, and the driver hands out 32 and then the same
            again.
        has_durations: Also record when things were issued and run.
        num_timed: Steps to time with and without a record, by turns, after the trace is written.
        on_progress: Called after each recorded step with what has ended.
    """
    results: dict[Path, TraceResult] = {}
    first = next(iter(scenarios.values()))
    with gpu_world(first, seat, tree=hosted.tree, targets=[hosted.target]) as rank:
        for out, scenario in scenarios.items():
            results[out] = _record(
                scenario,
                out,
                rank,
                hosted=hosted,
                seat=seat,
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
    hosted: Hosted,
    seat: Seat | None,
    num_warmup: int,
    has_durations: bool,
    num_timed: int,
    on_progress: Callable[[str], None],
) -> TraceResult:
    from real.mcore.jobs import run_job

    target = find_target(hosted.target)
    has_own_first_step = getattr(target, "has_own_first_step", False)
    if num_warmup and has_own_first_step:
        _warm_up(target, scenario, seat, num_warmup)
    points = target.points()
    file = open_file(out, rank, scenario.world_size, is_alone=seat is not None)
    with ExitStack() as stack:
        stack.callback(file.close)
        recorder = _recorder(file, has_durations=has_durations)
        recorder.header(
            rank=rank,
            world_size=scenario.world_size,
            scenario=scenario.as_dict(),
            peers=None if seat is None else BACKEND,
            **hosted.identity(),
        )
        with _recorded(recorder, points), built_alone(seat, target):
            job = target.build(scenario)
            target.describe(job, recorder.storage_number)
        if not has_own_first_step:
            _run_untold(job, num_warmup)
        with _recorded(recorder, points):
            output = run_job(
                job, scenario, on_step=lambda step: on_progress(f"step {step} of {out}")
            )
        recorder.close()
    times: tuple[float, float] | tuple[None, None] = (None, None)
    if num_timed:
        times = _time_steps(job, points, scenario, out, num_timed)
    return TraceResult(
        num_records=recorder.num_records,
        losses=[step.loss for step in output.steps],
        grad_norms=[step.grad_norm for step in output.steps],
        plain_ms=times[0],
        recorded_ms=times[1],
        seat=seat,
    )


def _warm_up(target: Target, scenario: Scenario, seat: Seat | None, num_warmup: int) -> None:
    """Runs steps of a job that is then dropped: some targets do other things in their first step.

    The job that is recorded starts as new, so its first step is the one that a simulation has.
    """
    with built_alone(seat, target):
        job = target.build(scenario)
    _run_untold(job, num_warmup)
    torch.cuda.synchronize()
    job.release()
    del job
    gc.collect()
    torch.cuda.empty_cache()


def _run_untold(job: Job, num_steps: int) -> None:
    """Runs forward and backward of some steps without a record."""
    for _ in range(num_steps):
        job.forward_backward(0)
        job.clear_gradients()


def _recorder(file: JsonlSink, *, has_durations: bool) -> GpuRecorder:
    if not has_durations:
        return GpuRecorder(file)
    sink = HoldingSink(file)
    return GpuRecorder(sink, times=DeviceTimes(sink))


@contextmanager
def _recorded(recorder: GpuRecorder, points: Sequence[Point]) -> Iterator[None]:
    from real.mcore.observe import recorded_nodes

    with recorded_nodes(points), observed(recorder):
        yield


def _time_steps(
    job: Job, points: Sequence[Point], scenario: Scenario, out: Path, repeats: int
) -> tuple[float, float]:
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
        with _recorded(recorder, points):
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
