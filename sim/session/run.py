"""Runs a scenario and its reference on fake ranks and judges the one by the other."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from real.config import Scenario
from real.result import RunResult, judge
from real.trace import Sink, Trace
from sim.checks import (
    RULES_BY_VALUE,
    Violation,
    check_numerics,
    check_traces,
    declared_units,
)
from sim.checks import judge as judge_traces
from sim.checks.errors import violations_of_error
from sim.orders.findings import check_stalled
from sim.session.aside import Aside, can_fork
from sim.session.megatron import frozen_imports, megatron_on_fake_cuda
from sim.session.options import DEFAULTS, Progress, RunOptions, no_progress
from sim.session.rank import RankPlan
from sim.session.sinks import KeepingSink, keeping, traces_of
from sim.session.subject import reference_subject
from sim.session.world import WorldOptions, make_world, train
from sim.world import WorldError

if TYPE_CHECKING:
    from real.output import JobOutput


def run_in_process(
    scenario: Scenario,
    options: RunOptions = DEFAULTS,
    *,
    sinks: Sequence[Sink | None] = (),
    out: Path | None = None,
    progress: Progress = no_progress,
    references: list[JobOutput] | None = None,
) -> RunResult:
    """Runs all ranks of a scenario in this process, and of its reference in a forked copy.

    Args:
        scenario: The run.
        options: How it is run.
        sinks: Where each rank's records go; none to count them only.
        out: The folder that the sinks write to, for the result.
        progress: Shown one line of text now and then.
        references: What `run_reference` gave for this scenario; None runs it beside.

    Raises:
        WorldError: A rank failed, the ranks do not agree, or a fault never came up.
        ScenarioError: The Megatron of `options.tree` cannot be had.
    """
    kept = keeping(sinks, scenario.world_size)
    with ExitStack() as stack:
        for sink in kept:
            stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda(options.tree))
        started = time.perf_counter()
        stack.enter_context(frozen_imports())
        aside = None
        if references is None and can_fork():
            aside = Aside(lambda: run_reference(scenario, options, progress=progress))
            stack.callback(aside.stop)
        title = options.subject.title()
        try:
            outputs = _train(scenario, options, kept, progress)
        except WorldError as error:
            error.findings = _found_so_far(error, kept, options.replay)
            raise
        traces = traces_of(kept)
        verdict = judge_traces(
            traces,
            require=options.require,
            also=RULES_BY_VALUE,
            replay=options.replay or None,
        )
        if aside is not None:
            references = aside.result()
        elif references is None:
            references = run_reference(scenario, options, progress=progress)
        result = judge(
            outputs,
            references,
            num_records=sum(len(sink.records) for sink in kept),
            wall_s=time.perf_counter() - started,
            trace=out,
            reference=options.reference,
        )
        violations = [*verdict.violations, *check_stalled(traces, options.faults)]
        violations += check_numerics(outputs, references, units=declared_units(traces[0]))
    return dataclasses.replace(
        result,
        target=title,
        violations=tuple(str(v) for v in violations),
        reach=verdict.reach,
    )


def _found_so_far(error: WorldError, sinks: Sequence[KeepingSink], replay: str) -> list[Violation]:
    """Judges what a failed run has recorded; what the error itself stands for comes last."""
    if any(not sink.records for sink in sinks):
        return []  # a rank did not come as far as its header
    traces = traces_of(sinks, why_incomplete="the run failed")
    return [*check_traces(traces, replay=replay or None), *violations_of_error(error, traces)]


def record_traces(
    scenario: Scenario,
    options: RunOptions = DEFAULTS,
    *,
    sinks: Sequence[Sink | None] = (),
    progress: Progress = no_progress,
) -> list[Trace]:
    """Runs a scenario without its reference and returns every rank's trace, not judged.

    Args:
        scenario: The run.
        options: How it is run.
        sinks: Where each rank's records go too.
        progress: Shown one line of text now and then.

    Raises:
        WorldError: A rank failed, the ranks do not agree, or a fault never came up.
        ScenarioError: The Megatron of `options.tree` cannot be had.
    """
    kept = keeping(sinks, scenario.world_size)
    with ExitStack() as stack:
        for sink in kept:
            stack.callback(sink.close)
        stack.enter_context(megatron_on_fake_cuda(options.tree))
        _train(scenario, options, kept, progress)
    return traces_of(kept)


def run_reference(
    scenario: Scenario, options: RunOptions = DEFAULTS, *, progress: Progress = no_progress
) -> list[JobOutput]:
    """Runs the reference of a scenario in this process; one entry a rank."""
    with megatron_on_fake_cuda(options.tree):
        return train(
            make_world(scenario.world_size, WorldOptions(schedule_seed=options.schedule_seed)),
            scenario,
            RankPlan(subject=reference_subject(options.reference, options.subject)),
            sinks=[None] * scenario.world_size,
            progress=progress,
        )


def _train(
    scenario: Scenario, options: RunOptions, sinks: Sequence[KeepingSink], progress: Progress
) -> list[JobOutput]:
    world = make_world(
        scenario.world_size,
        WorldOptions(
            schedule_seed=options.schedule_seed, faults=options.faults, replay=options.replay
        ),
    )
    plan = RankPlan(
        subject=options.subject,
        kernel_steps=options.recorded_steps(scenario),
        records_shapes=options.records_shapes,
    )
    return train(world, scenario, plan, sinks=sinks, progress=progress)
