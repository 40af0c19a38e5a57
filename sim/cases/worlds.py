"""Runs a body on fake ranks with everything recorded, and turns what happened into violations."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from real.config import Scenario
from real.trace import MemorySink, OpKind, Recorder, Trace, active_recorder, recording
from sim.checks import Check, Violation, check_numerics, check_traces, declared_units
from sim.checks.errors import violations_of_error
from sim.cuda import FakeDevice, use_device
from sim.cuda.kernels import KernelRecorder
from sim.megatron import megatron_on_fake_cuda, rank_state
from sim.world import World, WorldError, init_process_group

if TYPE_CHECKING:
    from real.mcore.jobs import FsdpJob, JobOutput
    from sim.faults import Fault

Defect = Callable[[], AbstractContextManager[Any]]
Change = Callable[["FsdpJob"], None]

SMALL: Final = Scenario(num_layers=2, num_microbatches=2, world_size=2, train_iters=1)
"""Two ranks, one expert-parallel group: the smallest run of the combined schedule."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a body is given.

    Attributes:
        number: Global rank.
        device: Its fake device.
        records: What it has recorded so far; grows.
    """

    number: int
    device: FakeDevice
    records: list[dict[str, Any]]
    _open: ExitStack

    def observe(self, root: nn.Module | None = None) -> None:
        """Records kernels from here on, after saying what units a built model consists of."""
        if root is not None:
            self.describe(root)
        self._open.enter_context(KernelRecorder(self.device))

    def describe(self, model: nn.Module) -> None:
        """Records what a model consists of: under the adapter, or the root unit alone."""
        from real.mcore import watch_table

        watch_table.describe(model, self.device.storage_id)

    def name(self, tensor: torch.Tensor, unit: str, kind: str = "full weight") -> None:
        """Names a tensor's storage as a buffer of a unit."""
        storage = self.device.storage_id(tensor.untyped_storage())
        self.device.recorder.record(OpKind.NAME, storage=storage, name=f"{unit}:{kind}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run on fake ranks left behind.

    Attributes:
        traces: One a rank; cut short where the run failed.
        results: What the body returned, one a rank; empty when the run failed.
        error: What ended the run early, or None.
    """

    traces: list[Trace]
    results: list[Any] = field(default_factory=list)
    error: WorldError | None = None

    def violations(self, *more: Check) -> list[Violation]:
        """Judges the error, if any, and the traces.

        The ranks of a run that failed stopped at different places, so they are not compared.

        Args:
            *more: Checks beside those of every run.
        """
        checks = (check_traces, *more)
        if self.error is None:
            return [violation for check in checks for violation in check(self.traces)]
        rank = self.error.rank
        judged = self.traces if rank is None else [self.traces[rank]]
        found = [
            *violations_of_error(self.error, self.traces),
            *(violation for trace in judged for check in checks for violation in check([trace])),
        ]
        if not found:
            raise self.error  # it breaks no rule: the bench or the case is at fault
        return found


def run_ranks(
    num_ranks: int,
    body: Callable[[Rank], Any],
    *,
    scenario: Scenario | None = None,
    faults: Sequence[Fault] = (),
    schedule_seed: int = 0,
) -> Outcome:
    """Runs `body` on fake ranks whose torch.distributed is up.

    Megatron must be importable (`megatron_on_fake_cuda`).

    Args:
        num_ranks: Number of ranks.
        body: What each rank does.
        scenario: Written into the traces' headers, where checks look for what was asked for; None
            for a body that runs no scenario.
        faults: Disturbances of the ranks' collectives.
        schedule_seed: Chooses the order in which ranks take turns.
    """
    sinks = [MemorySink() for _ in range(num_ranks)]

    def on_rank(number: int) -> Any:
        recorder = Recorder(sinks[number])
        recorder.header(
            rank=number,
            world_size=num_ranks,
            scenario={} if scenario is None else scenario.as_dict(),
        )
        with ExitStack() as stack:
            device = stack.enter_context(use_device(FakeDevice(number, recorder)))
            stack.enter_context(recording(recorder))
            init_process_group(number, num_ranks)
            rank = Rank(number=number, device=device, records=sinks[number].records, _open=stack)
            result = body(rank)
            recorder.close()
            return result

    from real.mcore.observe import recorded_nodes

    results: list[Any] = []
    error = None
    try:
        world = World(num_ranks, schedule_seed=schedule_seed, state=rank_state(), faults=faults)
        with recorded_nodes():
            results = world.run(on_rank)
    except WorldError as failure:
        error = failure
    traces = [
        Trace(
            rank=number,
            world_size=num_ranks,
            scenario={} if scenario is None else scenario.as_dict(),
            records=sink.records[1:],
            is_complete=error is None,
        )
        for number, sink in enumerate(sinks)
    ]
    return Outcome(traces=traces, results=results, error=error)


def run_scenario(
    scenario: Scenario,
    *,
    defect: Defect = nullcontext,
    change: Change = lambda _: None,
    compares: bool = True,
    faults: Sequence[Fault] = (),
    checks: Sequence[Check] = (),
) -> list[Violation]:
    """Trains a scenario under MFSDP v2 and our hooks, and returns all that is wrong with it.

    Args:
        scenario: The run.
        defect: In place for the whole run, in all ranks.
        change: Made to each rank's job before its first step.
        compares: Whether gradients and losses are compared with the reference.
        faults: Disturbances of the ranks' collectives.
        checks: Checks beside those of every run.
    """
    outcome = train(scenario, defect=defect, change=change, faults=faults)
    found = outcome.violations(*checks)
    if compares and outcome.error is None:
        from sim.cases.numbers import check_losses

        expected, units = reference(scenario), declared_units(outcome.traces[0])
        found += check_numerics(outcome.results, expected, units=units)
        found += check_losses(outcome.results, expected)
    return found


@functools.cache
def clean(scenario: Scenario) -> tuple[Violation, ...]:
    """Runs a scenario without a defect, once a process: the twin of every defect in its hooks."""
    return tuple(run_scenario(scenario))


@functools.cache
def reference(scenario: Scenario) -> list[JobOutput]:
    """Runs the reference of a scenario, once a process."""
    from sim.runner import run_reference

    return run_reference(scenario)


def train(
    scenario: Scenario,
    *,
    defect: Defect = nullcontext,
    change: Change = lambda _: None,
    faults: Sequence[Fault] = (),
) -> Outcome:
    """Trains a scenario under MFSDP v2 with everything recorded; results are `JobOutput`."""
    from real.mcore.jobs import FsdpJob, run_job
    from real.mcore.model import initialize_parallel

    def body(rank: Rank) -> JobOutput:
        initialize_parallel(scenario)
        job = FsdpJob(scenario)
        change(job)
        rank.observe(job.model)
        return run_job(job, scenario)

    with defect():
        return run_ranks(scenario.world_size, body, scenario=scenario, faults=faults)


@contextmanager
def replaced(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `make(what stands there)` in place of a dotted name for the length of the block."""
    import pkgutil

    owner_name, _, attribute = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)
    setattr(owner, attribute, make(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


@contextmanager
def all_of(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters several managers at once."""
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


@contextmanager
def bench() -> Iterator[None]:
    """Everything that cases need, for the length of the block: Megatron on fake CUDA."""
    with megatron_on_fake_cuda():
        gc.freeze()  # what is imported stays: no use in looking through it again and again
        try:
            yield
        finally:
            gc.unfreeze()


@contextmanager
def at_node(
    name: str,
    direction: str = "forward",
    *,
    layer: str | None = None,
    microbatch: int = 0,
) -> Iterator[None]:
    """Records a schedule node around the block, for bodies that play the schedule themselves."""
    recorder = active_recorder()
    recorder.record(
        OpKind.NODE,
        name=name,
        direction=direction,
        layer=layer,
        microbatch=microbatch,
        chunk=0,
        phase=None,
        stream=torch.cuda.current_stream().stream_id,
    )
    yield
    # Not on an error: the place where a run failed is inside its node.
    recorder.record(OpKind.NODE_END, name=name, direction=direction)
