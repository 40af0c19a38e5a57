"""Runs a body on fake ranks with everything recorded, and turns what happened into violations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from real.config import Scenario
from real.trace import MemorySink, OpKind, Trace, active_recorder
from sim.checks import Check, Violation, check_numerics, check_traces, declared_units
from sim.checks.errors import violations_of_error
from sim.cuda import FakeDevice
from sim.cuda.kernels import KernelRecorder
from sim.session.megatron import frozen_imports, megatron_on_fake_cuda
from sim.session.rank import rank_scope
from sim.session.sinks import begin_trace, traces_of
from sim.session.world import WorldOptions, make_world
from sim.swap import owner_of, swapped
from sim.world import WorldError

if TYPE_CHECKING:
    from real.mcore.jobs import FsdpJob
    from real.output import JobOutput
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
        self.device.recorder.record(OpKind.NAME, storage=storage, unit=unit, kind=kind)


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
    # Here and not by each rank: one that never starts has a trace too.
    recorders = [
        begin_trace(sink, number, num_ranks, scenario) for number, sink in enumerate(sinks)
    ]

    def on_rank(number: int) -> Any:
        with ExitStack() as stack:
            device = stack.enter_context(rank_scope(number, num_ranks, recorders[number]))
            records = sinks[number].records
            return body(Rank(number=number, device=device, records=records, _open=stack))

    from real.mcore.observe import recorded_nodes

    results: list[Any] = []
    error = None
    try:
        options = WorldOptions(schedule_seed=schedule_seed, faults=faults)
        with recorded_nodes():
            results = make_world(num_ranks, options).run(on_rank)
    except WorldError as failure:
        error = failure
    traces = traces_of(sinks, why_incomplete="" if error is None else "an error ended the run")
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
    from sim.session.run import run_reference

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
    with swapped(*owner_of(target), make):
        yield


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
    with megatron_on_fake_cuda(), frozen_imports():
        yield


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
