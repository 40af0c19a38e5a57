"""Runs the small models of a calibration for shapes: which calls their nodes make, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real.config import Scenario
from real.trace import MemorySink, Trace, read_traces
from real.variants import is_reference, part_name, vary
from sim.session import sinks
from sim.session.shapes import ShapesRun, run_for_shapes
from sim.timing.fit.hostfit import Timed, count_calls
from sim.timing.fit.reconcile import SmallModel
from sim.timing.replay.lower import step_records


def traces_of(
    scenario: Scenario, variant: str, *, folder: Path | None = None, marks_units: bool = False
) -> list[Trace]:
    """Runs a variant of a scenario for shapes and returns the traces of all ranks.

    Args:
        scenario: What is varied.
        variant: A name of `real.variants.VARIANTS`.
        folder: Where the traces stay, or None.
        marks_units: Also mark begin and end of work on units.
    """
    varied = vary(scenario, variant)
    memory = [MemorySink() for _ in range(scenario.world_size)]
    options = ShapesRun(is_reference=is_reference(variant), marks_units=marks_units)
    if folder is not None:
        run_for_shapes(varied, options, sinks=sinks.open_sinks(folder, scenario.world_size))
        return read_traces(folder)
    run_for_shapes(varied, options, sinks=memory)
    return sinks.traces_of(memory)


@dataclass(frozen=True, kw_only=True)
class Small:
    """The small models of a calibration: what was timed in them, and traces of them.

    Attributes:
        timed: Their parts, with the calls inside.
        models: Their whole steps.
    """

    timed: Sequence[Timed]
    models: Sequence[SmallModel]


def small_models(measured: Mapping[str, Any], scenario: Scenario) -> Small:
    """Traces every small model that was timed.

    Args:
        measured: What `real calibrate` wrote.
        scenario: The small model of two layers.
    """
    timed, models = [], []
    for name, variants in measured["nodes"].items():
        layers = int(name.split()[0])
        for variant, times in variants.items():
            is_overlapped = vary(scenario, variant).overlap_moe_expert_parallel_comm
            is_sharded = not is_reference(variant)
            small = scenario.changed(num_layers=layers)
            marked = traces_of(small, variant, marks_units=True)
            timed.append(
                Timed(
                    variant=variant,
                    layers=layers,
                    microbatches=scenario.num_microbatches,
                    parts={
                        part_name(key, is_overlapped=is_overlapped, is_sharded=is_sharded): part
                        for key, part in times["parts"].items()
                    },
                    calls=count_calls(step_records(marked[0])),
                )
            )
            # Half of the steps were timed with their parts and half without.
            step_us = (times["step_us"] + times["step_with_parts_us"]) / 2
            # Marks of units would count as nodes of the schedule.
            traces = traces_of(small, variant) if is_sharded else marked
            models.append(SmallModel(variant=variant, traces=traces, step_ns=1e3 * step_us))
    return Small(timed=timed, models=models)
