"""`python -m sim accuracy`: compares predictions with a measured grid of configurations."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real.config import load_scenario
from sim.commands.common import FIXTURES, Progress, fail, no_progress, progress_line

if TYPE_CHECKING:
    from real.trace import Trace
    from sim.timing.fit.accuracy import Measured

MOST_FITTED: Final = 4
"""Configurations that may be fitted: the others are what the model is judged by."""


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "accuracy",
        help="compare predicted with measured step times",
        description="Predicts each configuration of a measured grid (`real bench --grid`) and "
        "prints the errors. Exit status: 0 done, 2 bad input.",
    )
    parser.add_argument("measured", type=Path, help="JSON Lines of `real bench --grid`")
    parser.add_argument("--cluster", default="h200-x2", metavar="FILE", help="the cost file")
    parser.add_argument(
        "--grid", type=Path, default=FIXTURES / "configs" / "grid", help="folder of the models"
    )
    parser.add_argument(
        "--fit",
        default="",
        metavar="MODEL:VARIANT,...",
        help=f"fit factors to these, at most {MOST_FITTED}, and leave them out of the verdict",
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep traces here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Predicts and compares."""
    from sim.timing.costs.costfile import CostError, load_cluster

    try:
        measured = _read(arguments.measured)
        cluster = load_cluster(arguments.cluster)
    except CostError as error:
        return fail(str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return fail(f"Expected JSON Lines of `real bench --grid`, got: {error!r}.")
    fitted = [name for name in arguments.fit.split(",") if name]
    names = [one.name for one in measured]
    unknown = [name for name in fitted if name not in names]
    if unknown or len(fitted) > MOST_FITTED:
        return fail(
            f"Expected at most {MOST_FITTED} of the measured configurations to fit, got "
            f"{unknown or fitted}."
        )
    from sim.quiet import quiet

    quiet()
    from sim.timing.fit.accuracy import Factors, as_table, fit, judge, predict

    progress = no_progress if arguments.json else progress_line()
    source = _Traces(arguments.grid, arguments.traces, progress)
    factors = Factors()
    if fitted:
        chosen = [one for one in measured if one.name in fitted]
        factors = fit(chosen, source.of, cluster, progress=progress)
    predictions = list(predict(measured, source.of, factors.apply(cluster), fitted=fitted))
    progress("")
    found = dataclasses.asdict(factors) if fitted else {}
    if arguments.json:
        lines = [
            {
                **dataclasses.asdict(one.measured),
                "predicted_ms": round(one.step_ms, 2),
                "error": round(one.error, 4),
                "predicted_peak_bytes": one.peak_bytes,
                "peak_error": round(one.peak_error, 4),
                "is_fitted": one.is_fitted,
            }
            for one in predictions
        ]
        verdict = dataclasses.asdict(judge(predictions))
        print(json.dumps({"configurations": lines, "factors": found, "verdict": verdict}))
    else:
        print(as_table(predictions, found))
    return 0


def _read(path: Path) -> list[Measured]:
    from sim.timing.fit.accuracy import Measured

    entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        Measured(
            config=entry["config"],
            variant=entry["variant"],
            step_ms=entry["step_ms"],
            peak_bytes=_peak(entry),
            world_size=entry.get("world_size"),
        )
        for entry in entries
    ]


def _peak(entry: dict[str, Any]) -> int:
    """Returns the mean over ranks: they differ by routing, which is even in a run for shapes."""
    by_rank: list[int] = entry.get("peak_bytes_by_rank") or [entry["peak_bytes_above_rest"]]
    return round(sum(by_rank) / len(by_rank))


class _Traces:
    """Runs configurations for shapes, each once; a folder keeps them between commands."""

    def __init__(self, grid: Path, folder: Path | None, progress: Progress) -> None:
        self._grid = grid
        self._folder = folder
        self._progress = progress
        self._known: dict[tuple[object, str], list[Trace]] = {}

    def of(self, measured: Measured) -> list[Trace]:
        """Returns the traces of a configuration."""
        key = (measured.model, measured.variant)
        known = self._known.get(key)
        if known is None:
            known = self._make(measured)
            if len(self._known) < MOST_FITTED:
                self._known[key] = known
        return known

    def _make(self, measured: Measured) -> list[Trace]:
        from real.trace import read_traces
        from sim.timing.fit.small import traces_of

        self._progress(f"shapes: {measured.name}")
        scenario = load_scenario(self._grid / f"{measured.config}.toml")
        if measured.world_size is not None:
            scenario = scenario.changed(world_size=measured.world_size)
        name = f"{measured.name.replace(':', '-')}-{scenario.world_size}"
        folder = None if self._folder is None else self._folder / name
        if folder is not None and folder.exists():
            return read_traces(folder)
        return traces_of(scenario, measured.variant, folder=folder)
