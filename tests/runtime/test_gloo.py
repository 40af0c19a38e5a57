"""Processes over gloo give the numbers and the traces of ranks in one process, and never hang."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from real.config import Scenario, load_scenario
from real.trace import JsonlSink, MemorySink, trace_path
from sim.commands.common import DEFAULT_SCENARIO
from sim.session import gloo
from sim.session.gloo import run_gloo
from sim.session.options import RunOptions
from sim.session.run import run_in_process
from sim.world import WorldError

pytestmark = [
    pytest.mark.slow,
    # Megatron and torch warn of their own deprecated names while a model is built.
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
    ),
]


@pytest.fixture
def small() -> Scenario:
    """2 layers, 2 microbatches, 1 step on 2 ranks."""
    scenario = load_scenario(DEFAULT_SCENARIO)
    return scenario.changed(num_layers=2, num_microbatches=2, train_iters=1, world_size=2)


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the test starts."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **kwargs)
        if "sim.session.gloo_rank" in args[0]:
            started.append(process)
        return process

    monkeypatch.setattr(gloo.subprocess, "Popen", start)
    return started


def _all_ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    return all(process.returncode is not None for process in processes)


def test_gloo_gives_the_numbers_and_traces_of_one_process(
    small: Scenario, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    paths = [trace_path(tmp_path, rank) for rank in range(2)]
    expected = run_in_process(small, sinks=[JsonlSink(path) for path in paths], out=tmp_path)
    shown: list[str] = []
    result = run_gloo(small, out=tmp_path / "gloo", progress=shown.append)
    assert dataclasses.replace(result, wall_s=0, trace=None) == dataclasses.replace(
        expected,
        wall_s=0,
        trace=None,
        reach=None,  # the trace of such a run is not judged
    )
    for path in paths:
        assert (tmp_path / "gloo" / path.name).read_bytes() == path.read_bytes()
    assert shown == ["scenario: step 1 of 1", "reference: step 1 of 1"]
    assert len(processes) == 2
    assert _all_ended(processes)


def test_gloo_hands_records_to_sinks(small: Scenario) -> None:
    sinks = [MemorySink(), MemorySink()]
    result = run_gloo(small, out=None, sinks=sinks)
    assert [sink.records[0]["rank"] for sink in sinks] == [0, 1]
    assert sum(len(sink.records) for sink in sinks) == result.num_records


def test_process_that_dies_ends_the_run_and_is_named(
    small: Scenario, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The others notice a lost connection; the report names the one that died."""

    def kill(text: str) -> None:
        processes[1].kill()

    with pytest.raises(WorldError) as caught:
        run_gloo(small.changed(train_iters=50), RunOptions(replay="again"), out=None, progress=kill)
    first_line = caught.value.problem.partition("\n")[0]
    assert first_line == f"Rank 1 died with exit status {-signal.SIGKILL}."
    assert caught.value.rank == 1
    assert [line.partition(":")[0] for line in caught.value.standing] == ["rank 0", "rank 1"]
    assert str(caught.value).endswith("Replay: again")
    assert _all_ended(processes)


def test_interrupt_leaves_no_process(
    small: Scenario, processes: list[subprocess.Popen[bytes]]
) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_gloo(small, out=None, progress=interrupt)
    assert len(processes) == 2
    assert _all_ended(processes)


def test_error_of_a_rank_is_reported_with_its_message(
    small: Scenario,
    processes: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 cannot write its trace; rank 0 waits for it somewhere."""
    encode = json.dumps

    def misdirect(orders: Any) -> str:
        is_second = isinstance(orders, dict) and orders.get("rank") == 1
        return encode({**orders, "trace": str(tmp_path / "nowhere")} if is_second else orders)

    monkeypatch.setattr(json, "dumps", misdirect)
    with pytest.raises(WorldError, match="Rank 1 raised FileNotFoundError: ") as caught:
        run_gloo(small, out=tmp_path)
    assert caught.value.standing[1].startswith("rank 1: raised FileNotFoundError, ")
    assert _all_ended(processes)
