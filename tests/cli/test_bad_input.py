"""Bad input: one line on stderr that says what was expected, and status 2."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pytest_mock import MockerFixture

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

ROOT = Path(__file__).parents[2]


def assert_refused(outcome: Outcome, pattern: str) -> None:
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1, outcome.err
    assert re.search(pattern, outcome.err), outcome.err


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("--ranks 5", "world-size to be a multiple of expert-model-parallel-size, got 5 and 2"),
        ("--num-experts 3", "num-experts to be a multiple of expert-model-parallel-size"),
        ("--hidden-size 30", "hidden-size to be a multiple of num-attention-heads, got 30 and 4"),
        ("--num-layers -1", "num-layers of 1 or more, got -1"),
        ("--steps 0", "train-iters of 1 or more, got 0"),
        ("--seed -1", "seed of 0 or more, got -1"),
        ("--lr -0.1", "lr of 0 or more, got -0.1"),
        ("--clip-grad nan", "clip-grad of 0 or more, got nan"),
        ("--num-layers many", "argument --num-layers: invalid int value: 'many'"),
        ("--num-layers 2.5", "argument --num-layers: invalid int value: '2.5'"),
        ("--prefetch backward", "argument --prefetch: invalid choice: 'backward'"),
        ("--schedule-seed x", "argument --schedule-seed: invalid int value: 'x'"),
        ("--tensor-parallel", "unrecognized arguments: --tensor-parallel"),
        (
            "--delay-wgrad-compute",
            "transformer-impl of transformer_engine with delay-wgrad-compute",
        ),
        (
            "--delay-wgrad-compute --no-overlap-moe-expert-parallel-comm",
            "overlap-moe-expert-parallel-comm with delay-wgrad-compute, got it off",
        ),
        (
            "--recompute-granularity full",
            "recompute-granularity of none or selective with overlap-moe-expert-parallel-comm",
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp",
            "recompute-modules among core_attn, layernorm, got 'mlp'",
        ),
        ("--expert-model-parallel-size 1", "expert-model-parallel-size of 2 or more with overlap"),
        ("--moe-router-topk 5", "moe-router-topk of at most num-experts, got 5 and 4"),
        ("--moe-layer-freq 0,1", "moe-layer-freq of 1 or 4 comma-separated 0 or 1, got '0,1'"),
        ("--moe-layer-freq 0,1,1,2", "moe-layer-freq of 1 or 4 comma-separated 0 or 1"),
        ("--mtp-num-layers 2", "mtp-num-layers of 0 or 1, got 2"),
        (
            "--num-distributed-optimizer-instances 3",
            "to be a multiple of num-distributed-optimizer-instances, got 2 and 3",
        ),
        ("--hybrid-layer-pattern *M", "hybrid-layer-pattern of 4 symbols among"),
        ("--hybrid-layer-pattern *E*-", "HybridModel of megatron-core 0.19 builds no plan"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(
    sim: Callable[..., Outcome], words: str, pattern: str
) -> None:
    """Who typed it sees the flag's own name and both values."""
    assert_refused(sim("run", *words.split()), pattern)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("[model]\nnum-layer = 2\n", r"known key in \[model\], got 'num-layer'.*'num-layers'\?$"),
        ("[model]\nnum_layers = 2\n", r"got 'num_layers'\. Did you mean 'num-layers'\?$"),
        ("[model]\ncolour = 2\n", r"expected a known key in \[model\], got 'colour'\.$"),
        ("[model]\nlr = 0.1\n", r"expected 'lr' in section \[training\], got it in \[model\]"),
        ("[modle]\nnum-layers = 2\n", r"expected the sections \[model\], .*; got 'modle'"),
        ("num-layers = 2\n", r"expected the sections \[model\], .*; got 'num-layers'"),
        ('[model]\nnum-layers = "2"\n', "Expected int for num-layers, got '2'"),
        ("[model]\nnum-layers = true\n", "Expected int for num-layers, got True"),
        ("[model]\nnum-layers = 2.0\n", "Expected int for num-layers, got 2.0"),
        ("[schedule]\ndelay-wgrad-compute = 1\n", "Expected bool for delay-wgrad-compute, got 1"),
        ('[schedule]\nprefetch = "all"\n', "prefetch to be one of none, forward, both; got 'all'"),
        ("[parallel]\nworld-size = 3\n", "world-size to be a multiple of expert-model"),
        ("[model\n", "expected TOML, got: "),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    sim: Callable[..., Outcome], tmp_path: Path, content: str, pattern: str
) -> None:
    """The file may not be the one that was meant."""
    path = tmp_path / "scenario.toml"
    path.write_text(content)
    outcome = sim("run", path)
    assert_refused(outcome, pattern)
    assert outcome.err.startswith(f"sim: {path}: ")


def test_a_file_that_is_no_text_is_refused(sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """A trace or an archive in place of a scenario."""
    path = tmp_path / "scenario.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert_refused(sim("run", path), "expected TOML, got: ")


def test_a_missing_file_is_refused(sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """With the system's reason."""
    assert_refused(sim("run", tmp_path / "no.toml"), r"no\.toml: cannot read .*: No such file")


def test_a_folder_is_no_scenario(sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """Completion in a shell stops at the folder."""
    assert_refused(sim("run", tmp_path), "cannot read the scenario: Is a directory")


def test_an_output_folder_that_cannot_be_made_is_refused(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Before the run, not after it."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "trace"
    assert_refused(sim("run", "--out", out), f"folder to write to, got {out}: Not a directory")


def test_a_missing_command_is_refused(sim: Callable[..., Outcome]) -> None:
    """The commands are named."""
    assert_refused(sim(), "the following arguments are required: command")


@pytest.mark.parametrize("version", ["0.18.1", "0.20.0", "0.190.0"])
def test_another_megatron_version_is_refused(
    sim: Callable[..., Outcome], mocker: MockerFixture, version: str
) -> None:
    """Its private names are others, which would show as an AttributeError deep inside."""
    mocker.patch("importlib.metadata.version", return_value=version)
    assert_refused(sim("run"), rf"Expected megatron-core 0\.19\.\*.*, got {re.escape(version)}\.$")


def test_a_missing_megatron_is_refused(sim: Callable[..., Outcome], mocker: MockerFixture) -> None:
    """The same line says what to install."""
    missing = importlib.metadata.PackageNotFoundError("megatron-core")
    mocker.patch("importlib.metadata.version", side_effect=missing)
    assert_refused(sim("run"), r"Expected megatron-core 0\.19\.\*.*, got none\.$")


def test_bad_input_is_answered_before_torch_loads() -> None:
    """A misspelt flag should not cost ten seconds."""
    program = (
        "import sys; from sim.cli import main; status = main(['run', '--ranks', '5']);"
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n"
