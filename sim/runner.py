"""Runs a scenario and its reference on fake ranks and judges the one by the other."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from real.config import Scenario, ScenarioError
from real.reference import Reference
from real.result import RunResult, judge
from real.targets import find_target
from real.trace import JsonlSink, Sink, Trace, trace_path
from real.trace.recorder import Record
from sim.aside import Aside, can_fork
from sim.checks import check_numerics, check_traces, declared_units
from sim.fuzz.findings import check_stalled
from sim.hosting import RELEASE, Hosted
from sim.megatron import megatron_on_fake_cuda, rank_state
from sim.rank import run_rank

if TYPE_CHECKING:
    from real.mcore.jobs import JobOutput
    from sim.faults import Fault

Progress = Callable[[str], None]


def open_sinks(out: Path | None, world_size: int) -> list[Sink | None]:
    """Opens one trace file per rank, after removing an older trace in the same folder.

    Raises:
        ScenarioError: The folder cannot be written.
    """
    if out is None:
        return [None] * world_size
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("rank*.jsonl"):
            old.unlink()
        return [JsonlSink(trace_path(out, rank)) for rank in range(world_size)]
    except OSError as error:
        raise ScenarioError(
            f"Expected a folder to write to, got {out}: {error.strerror}."
        ) from None


class _KeepingSink:
    """Keeps records for the checks, on their way to another sink."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def run_in_process(
    scenario: Scenario,
    *,
    schedule_seed: int = 0,
    sinks: Sequence[Sink | None] = (),
    out: Path | None = None,
    replay: str = "",
    faults: Sequence[Fault] = (),
    progress: Progress = lambda _: None,
    records_kernels: bool = False,
    kernel_steps: Collection[int] | None = None,
    records_shapes: bool = False,
    references: list[JobOutput] | None = None,
    reference: Reference = Reference.DDP,
    hosted: Hosted = RELEASE,
) -> RunResult:
    """Runs all ranks of a scenario in this process, and of its reference in a forked copy.

    Args:
        scenario: The run.
        schedule_seed: Chooses the order in which ranks take turns.
        sinks: Where each rank's records go; none to count them only.
        out: The folder that the sinks write to, for the result.
        replay: The command that repeats this run, for messages.
        faults: Disturbances of the scenario; stalls need kernels.
        progress: Shown one line of text now and then.
        records_kernels: Also record kernels with the storages that they read and write.
        kernel_steps: Only in these steps; None records all.
        records_shapes: Also record the shapes of what kernels read and write.
        references: What `run_reference` gave for this scenario; None runs it beside.
        reference: What the scenario is compared with.
        hosted: What is under test.

    Raises:
        WorldError: A rank failed, the ranks do not agree, or a fault never came up.
    """
    steps = range(scenario.train_iters) if kernel_steps is None else kernel_steps
    kept = [_KeepingSink(sink) for sink in sinks or [None] * scenario.world_size]
    with ExitStack() as stack:
        for sink in kept:
            stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda())
        from real.mcore.observe import recorded_nodes

        started = time.perf_counter()
        gc.freeze()  # what is imported stays: no use in looking through it again and again
        stack.callback(gc.unfreeze)

        aside = None
        if references is None and can_fork():
            aside = Aside(
                lambda: _pack(run_reference(scenario, schedule_seed, progress, reference, hosted))
            )
            stack.callback(aside.stop)
        target = find_target(hosted.target)
        with recorded_nodes(target.points()):
            outputs = _run_world(
                scenario,
                is_reference=False,
                sinks=kept,
                schedule_seed=schedule_seed,
                replay=replay,
                faults=faults,
                progress=progress,
                kernel_steps=steps if records_kernels else (),
                records_shapes=records_shapes,
                hosted=hosted,
            )
        traces = [_trace_of(sink.records) for sink in kept]
        violations = check_traces(traces, replay=replay or None)
        if aside is not None:
            references = _unpack(aside.result())
        elif references is None:
            references = run_reference(scenario, schedule_seed, progress, reference, hosted)
        result = judge(
            outputs,
            references,
            num_records=sum(len(sink.records) for sink in kept),
            wall_s=time.perf_counter() - started,
            trace=out,
            reference=reference,
        )
        violations += check_stalled(traces, faults)
        violations += check_numerics(outputs, references, units=declared_units(traces[0]))
    return dataclasses.replace(
        result, target=target.title, violations=tuple(str(v) for v in violations)
    )


def record_traces(
    scenario: Scenario,
    *,
    schedule_seed: int = 0,
    sinks: Sequence[Sink | None] = (),
    faults: Sequence[Fault] = (),
    kernel_steps: Collection[int] | None = None,
    records_shapes: bool = False,
    progress: Progress = lambda _: None,
) -> list[Trace]:
    """Runs a scenario without its reference and returns every rank's trace, not judged.

    Args:
        scenario: The run.
        schedule_seed: Chooses the order in which ranks take turns.
        sinks: Where each rank's records go too.
        faults: Disturbances of the scenario's collectives.
        kernel_steps: Steps in which kernels are recorded; None records all.
        records_shapes: Also record the shapes of what kernels read and write.
        progress: Shown one line of text now and then.

    Raises:
        WorldError: A rank failed or the ranks do not agree.
    """
    kept = [_KeepingSink(sink) for sink in sinks or [None] * scenario.world_size]
    with ExitStack() as stack:
        for sink in kept:
            stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda())
        from real.mcore.observe import recorded_nodes

        stack.enter_context(recorded_nodes())
        _run_world(
            scenario,
            is_reference=False,
            sinks=kept,
            schedule_seed=schedule_seed,
            replay="",
            faults=faults,
            progress=progress,
            kernel_steps=range(scenario.train_iters) if kernel_steps is None else kernel_steps,
            records_shapes=records_shapes,
        )
    return [_trace_of(sink.records) for sink in kept]


def run_reference(
    scenario: Scenario,
    schedule_seed: int = 0,
    progress: Progress = lambda _: None,
    reference: Reference = Reference.DDP,
    hosted: Hosted = RELEASE,
) -> list[JobOutput]:
    """Runs the reference of a scenario in this process; one entry a rank."""
    with megatron_on_fake_cuda():
        return _run_world(
            scenario,
            is_reference=True,
            reference=reference,
            hosted=hosted,
            sinks=[None] * scenario.world_size,
            schedule_seed=schedule_seed,
            replay="",
            faults=(),
            progress=progress,
        )


def _trace_of(records: list[Record]) -> Trace:
    header = records[0]
    return Trace(
        rank=header["rank"],
        world_size=header["world_size"],
        scenario=header["scenario"],
        records=records[1:],
        is_complete=True,
    )


def _pack(outputs: list[JobOutput]) -> Any:
    """Turns outputs into plain data for another process."""
    return [
        (
            [(s.loss, s.grad_norm, _to_numpy(s.gradients)) for s in output.steps],
            _to_numpy(output.weights),
        )
        for output in outputs
    ]


def _to_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _to_torch(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _unpack(packed: Any) -> list[JobOutput]:
    from real.mcore.jobs import JobOutput, StepOutput

    return [
        JobOutput(
            steps=[
                StepOutput(loss=loss, grad_norm=norm, gradients=_to_torch(gradients))
                for loss, norm, gradients in steps
            ],
            weights=_to_torch(weights),
        )
        for steps, weights in packed
    ]


def _run_world(
    scenario: Scenario,
    *,
    is_reference: bool,
    sinks: Sequence[Sink | None],
    schedule_seed: int,
    replay: str,
    faults: Sequence[Fault],
    progress: Progress,
    kernel_steps: Collection[int] = (),
    records_shapes: bool = False,
    reference: Reference = Reference.DDP,
    hosted: Hosted = RELEASE,
) -> list[JobOutput]:
    from sim.world import World, init_process_group

    label = "reference" if is_reference else "scenario"

    def body(rank: int) -> JobOutput:
        def on_step(step: int) -> None:
            if rank == 0:
                progress(f"{label}: step {step + 1} of {scenario.train_iters}")

        return run_rank(
            scenario,
            rank,
            is_reference=is_reference,
            reference=reference,
            hosted=hosted,
            sink=sinks[rank],
            start=init_process_group,
            on_step=on_step,
            kernel_steps=kernel_steps,
            records_shapes=records_shapes,
        )

    world = World(
        scenario.world_size,
        schedule_seed=schedule_seed,
        state=rank_state(),
        faults=faults,
        replay=replay,
    )
    return world.run(body)
