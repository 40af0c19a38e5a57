"""Times a grid of variants of one trace and says which differences can be told apart.

[Note: two bands] A step time is off by what the cost file's numbers are off: `error.step`. Variants
of one trace share the numbers that do not change, so their difference is off by far less: by the
same share of the difference itself, and by `error.difference` of the step, which is what repeats of
one setting differ by on real clusters. A smaller difference is too close to call.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Final

from real.config import Scenario
from real.trace import MemorySink, Trace
from sim.timing.answers.breakdown import break_down, summary
from sim.timing.answers.variants import KNOBS, Part, Value, Variant
from sim.timing.costs.costfile import Cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.fold import replay_folded
from sim.timing.replay.memory import memory_timeline
from sim.timing.replay.program import ReplayError

LEAST_DIFFERENCE: Final = 0.02
"""Smallest difference that is ever called, as a share of the step."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant and what came of it.

    Attributes:
        variant: Its settings.
        numbers: What `breakdown.summary` says, and peak memory.
        band_ms: The step time is off by this much either way.
        difference_ms: Step time less that of the base.
        difference_band_ms: The difference is off by this much either way.
        verdict: "base", "faster", "slower" or "too close to call".
    """

    variant: Variant
    numbers: Mapping[str, Any]
    band_ms: float
    difference_ms: float
    difference_band_ms: float
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return {
            "knobs": dict(self.variant.values),
            **self.numbers,
            "band_ms": self.band_ms,
            "difference_ms": self.difference_ms,
            "difference_band_ms": self.difference_band_ms,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is asked.

    Attributes:
        traces: All ranks of the trace.
        cluster: What things cost.
        settings: Values by knob.
        step: The step to replay; None for the last.
    """

    traces: Sequence[Trace]
    cluster: Cluster
    settings: Mapping[str, Sequence[Value]]
    step: int | None = None
    reruns: bool = field(init=False)

    def __post_init__(self) -> None:
        world = len(self.traces)
        reruns = any(
            KNOBS[name].part == Part.SCENARIO
            or (KNOBS[name].part == Part.RANKS and any(int(v) % world for v in values))
            for name, values in self.settings.items()
        )
        object.__setattr__(self, "reruns", reruns)

    def variants(self) -> list[Variant]:
        """Returns the base, with everything as recorded, and every combination of values."""
        names = list(self.settings)
        combinations = itertools.product(*self.settings.values())
        every = [Variant(values=dict(zip(names, each, strict=True))) for each in combinations]
        return [Variant(values={}), *every]


def what_if(
    grid: Grid, *, progress: Progress = lambda done, total: None, jobs: int | None = None
) -> list[Row]:
    """Times every variant; the base comes first.

    Variants that record the same scenario are timed by one process, one after another.

    Args:
        grid: What is asked.
        progress: Told how many variants are done, and of how many.
        jobs: Processes; None for one a core, 1 for none but this one.

    Raises:
        ReplayError: A variant cannot be timed.
        ScenarioError: A variant's scenario does not fit.
    """
    variants = grid.variants()
    if grid.reruns:
        recorded = Scenario(**grid.traces[0].scenario)
        for variant in variants:  # what does not fit is said before anything runs
            recorded.changed(**_changes(grid, variant))
    numbers: dict[int, Mapping[str, Any]] = {}
    batches = list(_batches(grid, variants))
    jobs = min(len(batches), jobs or os.cpu_count() or 1)
    if jobs == 1:
        for batch in batches:
            for index, found in _time_batch(grid, [(i, variants[i]) for i in batch]):
                numbers[index] = found
                progress(len(numbers), len(variants))
    else:
        for results in _in_parallel(grid, variants, batches, jobs):
            numbers.update(results)
            progress(len(numbers), len(variants))
    return judge(grid.cluster, variants, [numbers[i] for i in range(len(variants))])


_grid: Grid | None = None  # what forked processes find instead of a copy through a pipe


def _in_parallel(
    grid: Grid, variants: Sequence[Variant], batches: Sequence[Sequence[int]], jobs: int
) -> Iterator[dict[int, Mapping[str, Any]]]:
    global _grid
    _grid = grid
    try:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, mp_context=fork, initializer=_use_one_thread) as pool:
            futures: list[Future[dict[int, Mapping[str, Any]]]] = [
                pool.submit(_time_in_child, [(i, variants[i]) for i in batch]) for batch in batches
            ]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        _grid = None


def _time_in_child(batch: list[tuple[int, Variant]]) -> dict[int, Mapping[str, Any]]:
    assert _grid is not None
    return dict(_time_batch(_grid, batch))


def _batches(grid: Grid, variants: Sequence[Variant]) -> Iterator[list[int]]:
    """Yields variants that share a recording; without one to make, every variant alone."""
    if not grid.reruns:
        yield from ([index] for index in range(len(variants)))
        return
    by_scenario: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for index, variant in enumerate(variants):
        key = tuple(sorted(_changes(grid, variant).items()))
        by_scenario.setdefault(key, []).append(index)
    yield from by_scenario.values()


def _changes(grid: Grid, variant: Variant) -> dict[str, Any]:
    changes = variant.scenario_changes()
    ranks = variant.num_ranks()
    if ranks is not None and ranks % len(grid.traces):
        changes["world_size"] = ranks
    return changes


def _time_batch(
    grid: Grid, batch: Sequence[tuple[int, Variant]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    traces: Sequence[Trace] = grid.traces
    step = grid.step
    if grid.reruns:
        scenario = Scenario(**traces[0].scenario)
        changed = scenario.changed(**_changes(grid, batch[0][1]))
        traces = record_shapes(changed, has_fsdp=_has_fsdp(traces[0]))
        step = None
    for index, variant in batch:
        yield index, time_variant(traces, grid.cluster, variant, step=step)


def time_variant(
    traces: Sequence[Trace], cluster: Cluster, variant: Variant, *, step: int | None = None
) -> dict[str, Any]:
    """Returns the numbers of one variant of a trace that has its scenario.

    Raises:
        ReplayError: It cannot be timed.
    """
    ranks = variant.num_ranks()
    folded = replay_folded(
        variant.rewrite().apply(traces),
        CostModel(variant.cluster(cluster)),
        step=step,
        conditions=variant.conditions(),
        num_ranks=None if ranks == len(traces) else ranks,
    )
    replay = folded.replay
    timed = range(len(replay.times.ranks))
    peak = max(memory_timeline(replay, index).peak_bytes for index in timed)
    numbers = summary([break_down(replay, index) for index in timed], replay.step_ns)
    return {"ranks": folded.num_ranks, **numbers, "peak_bytes": peak}


def _has_fsdp(trace: Trace) -> bool:
    return any(record["op"] in ("unit", "unshard") for record in trace.records)


def record_shapes(scenario: Scenario, *, has_fsdp: bool = True) -> list[Trace]:
    """Runs a scenario for its records alone.

    Args:
        scenario: The run.
        has_fsdp: False for the model without FSDP, under the scenario's schedule.

    Raises:
        ReplayError: Its ranks do not agree, or one fails.
        ScenarioError: The scenario does not fit.
    """
    from sim.quiet import quiet

    quiet()
    from sim.session.shapes import ShapesRun, run_for_shapes
    from sim.session.sinks import traces_of
    from sim.world import WorldError

    sinks = [MemorySink() for _ in range(scenario.world_size)]
    try:
        run_for_shapes(scenario, ShapesRun(is_reference=not has_fsdp), sinks=sinks)
    except WorldError as error:
        raise ReplayError(f"The changed scenario fails: {str(error).splitlines()[0]}") from None
    return traces_of(sinks)


def judge(
    cluster: Cluster, variants: Sequence[Variant], numbers: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Compares every variant with the first. See [Note: two bands]."""
    base = numbers[0]["step_ms"]
    floor = max(LEAST_DIFFERENCE, cluster.difference_error) * base
    rows = []
    for place, (variant, found) in enumerate(zip(variants, numbers, strict=True)):
        difference = found["step_ms"] - base
        band = floor + cluster.step_error * abs(difference)
        if place == 0:
            verdict = "base"
        elif abs(difference) <= band:
            verdict = "too close to call"
        else:
            verdict = "slower" if difference > 0 else "faster"
        rows.append(
            Row(
                variant=variant,
                numbers=found,
                band_ms=cluster.step_error * found["step_ms"],
                difference_ms=difference,
                difference_band_ms=band,
                verdict=verdict,
            )
        )
    return rows


def band_line(cluster: Cluster) -> str:
    """Returns what the bands are, in one line."""
    floor = max(LEAST_DIFFERENCE, cluster.difference_error)
    return (
        f"+-: {cluster.step_error:.0%} of a step; of a difference, {floor:.0%} of the step and "
        f"{cluster.step_error:.0%} of itself, since variants share their other costs"
    )


def table(rows: Sequence[Row]) -> str:
    """Returns all rows for readers."""
    names = [str(row.variant) or "as recorded" for row in rows]
    width = max(map(len, names))
    lines = [
        f"{'':{width}}    step ms   +-      difference ms  +-        A2A   FSDP   peak",
        f"{'':{width}}                                           hidden hidden    GiB",
    ]
    base = rows[0].numbers["step_ms"]
    for name, row in zip(names, rows, strict=True):
        found = row.numbers
        change = f"{row.difference_ms:+10.2f} ({100 * row.difference_ms / base:+.1f}%)"
        lines.append(
            f"{name:{width}} {found['step_ms']:10.2f} {row.band_ms:6.1f} "
            f"{change if row.verdict != 'base' else '':>20s} {_band(row):>6s} "
            f"{_share(found['a2a_hidden']):>6s} {_share(found['fsdp_comm_hidden']):>6s} "
            f"{found['peak_bytes'] / 2**30:6.2f}  {row.verdict}"
        )
    return "\n".join(lines)


def _band(row: Row) -> str:
    return "" if row.verdict == "base" else f"{row.difference_band_ms:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _use_one_thread() -> None:
    """Keeps torch from waiting for a pool of workers that did not survive the fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
