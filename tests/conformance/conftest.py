"""Records scenarios on both backends: on fake ranks, and by torchrun on two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from real.config import Scenario, load_scenario
from real.trace import MemorySink, Trace, read_traces, trace_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "fixtures" / "configs" / "conformance"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def launch(
    *words: object, num_ranks: int = 2, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a program on GPUs, one process each, from the root of the repository.

    Several may run at once, so each has a folder of its own for reports of its watchdog.
    """
    with tempfile.TemporaryDirectory(prefix="standing-") as report:
        command = [*LAUNCH, f"--nproc-per-node={num_ranks}", *map(str, words), "--report", report]
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@pytest.fixture(scope="session")
def on_two_gpus() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program under torchrun."""
    return launch


class Gpus:
    """Records every scenario at the first question: starting a job takes longer than running it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._is_recorded = False

    def __call__(self, name: str) -> list[Trace]:
        """Returns the traces of one scenario."""
        if not self._is_recorded:
            files = sorted(CONFIGS.glob("*.toml"))
            run = launch("-m", "real", "trace", *files, "--out", self._out, "--json")
            assert run.returncode == 0, run.stderr[-3000:]
            assert len(json.loads(run.stdout.strip().splitlines()[-1])) == len(files)
            self._is_recorded = True
        return read_traces(self._out / name)


def to_traces(sinks: Sequence[MemorySink]) -> list[Trace]:
    """Returns what ranks have recorded in memory as traces."""
    return [trace_of(sink.records) for sink in sinks]


class Fakes:
    """Runs scenarios on fake ranks."""

    def __call__(
        self, name: str, disturbed: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> list[Trace]:
        """Returns the traces of one scenario, run inside a block that changes something."""
        return self.trace(load_scenario(CONFIGS / f"{name}.toml"), disturbed)

    def trace(
        self,
        scenario: Scenario,
        disturbed: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Trace]:
        """Returns the traces of a scenario."""
        from sim.quiet import quiet
        from sim.session.megatron import megatron_on_fake_cuda

        sinks = [MemorySink() for _ in range(scenario.world_size)]
        with warnings.catch_warnings():
            quiet()
            with megatron_on_fake_cuda():
                from sim.session.rank import RankPlan
                from sim.session.world import make_world, train

                with disturbed():
                    train(make_world(scenario.world_size), scenario, RankPlan(), sinks=sinks)
        return to_traces(sinks)


class Backends(NamedTuple):
    """Both ways to run a scenario."""

    simulated: Fakes
    gpu: Gpus


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    """Returns both backends; the one with GPUs starts at its first use."""
    return Backends(Fakes(), Gpus(tmp_path_factory.mktemp("gpu-traces")))
