"""What a run costs: checking it, and real processes instead of one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from real.config import load_scenario
from sim.bench.figure import Figure, make_figure
from sim.commands.common import DEFAULT_SCENARIO

_REPEATS: Final = 3


def checking_figures() -> list[Figure]:
    """Runs the default scenario by turns with and without the checks; medians of processor time.

    Both write their trace. With checks the kernels of one step are recorded, as `sim run` does.
    """
    from sim.checks import check_traces
    from sim.session.options import RunOptions
    from sim.session.run import record_traces
    from sim.session.sinks import open_sinks

    scenario = load_scenario(DEFAULT_SCENARIO)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with TemporaryDirectory() as folder:
        for _ in range(_REPEATS):
            for is_checked, taken in seconds.items():
                started = time.process_time()
                traces = record_traces(
                    scenario,
                    RunOptions(kernel_steps=[1] if is_checked else []),
                    sinks=open_sinks(Path(folder), scenario.world_size),
                )
                if is_checked:
                    check_traces(traces)
                taken.append(time.process_time() - started)
    return [
        make_figure(
            "default scenario, checked",
            statistics.median(seconds[True]),
            "s of processor time, imports and reference excluded",
            peer="the same without checks and kernel records",
            peer_value=statistics.median(seconds[False]),
        )
    ]


def world_figures() -> list[Figure]:
    """Times the default scenario in one process and as gloo processes, start to end, by turns."""
    seconds: dict[str, list[float]] = {"inprocess": [], "gloo": []}
    with TemporaryDirectory() as folder:
        for _ in range(_REPEATS):
            for world, taken in seconds.items():
                started = time.perf_counter()
                command = [sys.executable, "-m", "sim", "run", "--world", world]
                subprocess.run(
                    [*command, "--kernels", "none", "--out", folder],
                    check=True,
                    capture_output=True,
                )
                taken.append(time.perf_counter() - started)
    return [
        make_figure(
            "default scenario, start to end",
            min(seconds["inprocess"]),
            "s",
            peer="--world gloo, one process a rank",
            peer_value=min(seconds["gloo"]),
        )
    ]


def trace_figures() -> list[Figure]:
    """Counts the bytes of the default scenario's trace."""
    from sim.session.options import RunOptions
    from sim.session.run import record_traces
    from sim.session.sinks import open_sinks

    scenario = load_scenario(DEFAULT_SCENARIO).changed(train_iters=2)
    with TemporaryDirectory() as folder:
        out = Path(folder)
        sinks = open_sinks(out, scenario.world_size)
        traces = record_traces(scenario, RunOptions(kernel_steps=[1]), sinks=sinks)
        num_records = sum(1 + len(trace.records) for trace in traces)
        num_bytes = sum(path.stat().st_size for path in out.iterdir())
    return [
        make_figure(
            "trace",
            num_bytes / num_records,
            "bytes/record",
            peer="limit",
            peer_value=150.0,
        )
    ]
