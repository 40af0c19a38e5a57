"""`python -m sim fuzz` and `--fault`: what they print and how they end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pytest_mock import MockerFixture

from real.config import Scenario
from sim.fuzz import run as fuzz_run
from sim.fuzz.run import FuzzResult
from sim.fuzz.seeds import Failure, Setting
from sim.fuzz.shrink import Shrunk
from tests.cli.conftest import sim

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

__all__ = ["sim"]

Sim = Callable[..., "Outcome"]
SMALL = "--num-layers 1 --ranks 2 --num-microbatches 1 --steps 1".split()
FAULT = "drop-wait rank=1 stream=compute on=all_gather"


@pytest.fixture
def found(mocker: MockerFixture) -> list[Setting]:
    """Stands for the seeds: the eighth fails, and shrinks to one layer."""
    settings: list[Setting] = []

    def fuzz(setting: Setting, seeds: range, **options: object) -> FuzzResult:
        settings.append(setting)
        failure = Failure(seed=7, kind="device order I4", problem="I4: too soon.\n  at rank 1")
        smaller = Setting(
            scenario=setting.scenario.changed(num_layers=1),
            faults=setting.faults,
            num_orders=setting.num_orders,
        )
        return FuzzResult(
            num_seeds=8,
            num_turn_orders=8,
            num_device_orders=32,
            failures=(failure,),
            shrunk=Shrunk(setting=smaller, failure=failure, num_trials=3),
            wall_s=1.25,
            is_interrupted=False,
        )

    mocker.patch.object(fuzz_run, "fuzz", fuzz)
    return settings


def test_a_failure_is_printed_with_what_repeats_it(sim: Sim, found: list[Setting]) -> None:
    words = ["fuzz", "--num-layers", 3, "--seeds", 20, "--device-orders", 5, "--fault", FAULT]
    status, out, err = sim(*words)
    assert (status, err) == (1, "")
    assert found[0].scenario == Scenario(num_layers=3)
    command = "Replay: python -m sim fuzz --first-seed 7 --seeds 1 --device-orders 5 "
    command += "--kernels-every 50 --num-layers {} --fault '" + FAULT + "'\n"
    assert "Seed 7 fails (device order I4): I4: too soon.\n  at rank 1\n" in out
    assert command.format(3) in out
    assert f"of 3 tried: --num-layers 1 --fault '{FAULT}'\n" in out
    assert command.format(1) in out
    assert "\r" not in out


@pytest.mark.usefixtures("found")
def test_json_has_everything_that_a_script_needs(sim: Sim) -> None:
    status, out, err = sim("fuzz", "--json", "--seeds", 20)
    assert (status, err, out.count("\n")) == (1, "", 1)
    result = json.loads(out)
    assert result["seeds"] == 20
    assert result["wall_s"] == 1.25
    assert result["failures"][0]["seed"] == 7
    assert result["failures"][0]["replay"].startswith("python -m sim fuzz --first-seed 7 --seeds 1")
    assert result["shrunk"]["flags"] == "--num-layers 1"
    assert (result["passed"], result["interrupted"], result["seeds_run"]) == (False, False, 8)


def test_a_replayed_command_has_the_same_flags(
    sim: Sim, found: list[Setting], tmp_path: Path
) -> None:
    """A scenario file stays in it."""
    path = tmp_path / "odd name.toml"
    path.write_text("[model]\nnum-layers = 2\n")
    _, out, _ = sim("fuzz", path, "--prefetch", "both", "--json")
    replay = json.loads(out)["failures"][0]["replay"]
    sim(*shlex.split(replay)[3:])
    assert found[0] == found[1]
    assert found[0].scenario == Scenario(num_layers=2, prefetch="both")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fuzz", "--seeds", 0], "Expected --seeds of 1 or more, got 0."),
        (["fuzz", "--first-seed", -1], "Expected --first-seed of 0 or more, got -1."),
        (["fuzz", "--jobs", 0], "Expected --jobs of 1 or more, got 0."),
        (["fuzz", "--fault", "drop-wait rank=9"], "Expected rank=0 to rank=3"),
        (["fuzz", "nowhere.toml"], "cannot read the scenario"),
        (["run", "--fault", "drop-wiat rank=1"], "Did you mean 'drop-wait'?"),
        (
            ["run", "--world", "gloo", "--fault", "drop-wait rank=1"],
            "Expected --fault with --world inprocess and arithmetic, got --world gloo.",
        ),
    ],
)
def test_bad_input_gets_one_line_and_2(sim: Sim, words: list[object], expected: str) -> None:
    status, out, err = sim(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("sim: ")
    assert expected in err


def test_help_says_what_a_seed_covers_and_lists_the_faults(sim: Sim) -> None:
    status, out, _ = sim("fuzz", "--help")
    assert status == 0
    assert "Then each seed covers" in out
    assert "stall-collective rank [n] [unit] [kind]" in " ".join(out.split())


@pytest.mark.slow
def test_a_fault_of_a_run_is_noticed(sim: Sim, tmp_path: Path) -> None:
    """Kernels are recorded without being asked for: the fault shows only there."""
    status, out, _ = sim("run", *SMALL, "--fault", FAULT, "--out", tmp_path)
    assert status == 1
    assert "I1: The full weight of unit <root> is used by two streams in no order." in out


@pytest.mark.slow
def test_a_fault_of_a_run_that_never_came_up_is_told(sim: Sim, tmp_path: Path) -> None:
    fault = "lose-callback rank=1 unit=nowhere"
    status, out, err = sim("run", *SMALL, "--fault", fault, "--out", tmp_path)
    assert (status, out) == (1, "")
    assert f"fault '{fault}' never came up" in err
    assert "Replay: python -m sim run" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_ctrl_c_says_what_was_done_and_leaves_no_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sim", "fuzz", *SMALL, "--seeds", "10000", "--jobs", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while process.poll() is None and not children.read_text():
            time.sleep(0.05)  # until the first seeds are on their way
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "sim: interrupted; the seeds that ended by then are above.\n"
    assert json.loads(out)["interrupted"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
