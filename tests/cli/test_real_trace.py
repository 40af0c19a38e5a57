"""`python -m real trace` on a machine without a GPU: bad input is answered in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.cli import main
from real.config import Scenario, ScenarioError
from real.trace import trace_path

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
ALONE = ["--peers", "loopback"]
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
ONE = CONFIGS / "conformance" / "combined-1.toml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([ONE], "required: --out"),
        ([ONE, "--out", "x", "--timed", "-1"], "Expected --timed of 0 or more, got -1"),
        ([ONE, "--out", "x", "--warmup", "-2"], "Expected --warmup of 0 or more, got -2"),
        ([ONE, ONE, "--out", "x"], "different names, got combined-1 twice"),
        (["none.toml", "--out", "x"], "cannot read the scenario"),
        ([ONE, "--out", "x", "--num-layers", "0"], "Expected num-layers of 1 or more, got 0"),
        ([ONE, "--out", "x"], "expected a launch by torchrun"),
        ([ONE, "--out", "x", "--rank", "0"], "Expected --rank with --peers loopback only"),
        ([ONE, "--out", "x", *ALONE], "Expected --world-size with --peers loopback, got none"),
        ([ONE, "--out", "x", *ALONE, "--world-size", "2"], "Expected --rank with --peers loopback"),
        ([ONE, "--out", "x", *ALONE, "--ranks", "2", "--rank", "2"], "--world-size 2, got 2"),
        ([ONE, "--out", "x", *ALONE, "--ranks", "2", "--rank", "-1"], "--world-size 2, got -1"),
        ([ONE, "--out", "x", *ALONE, "--ranks", "3", "--rank", "0"], "got 3 and 2"),
        ([ONE, "--out", "x", *ALONE, "--ranks", "2", "--rank", "x"], "invalid int value: 'x'"),
        ([ONE, "--out", "x", "--peers", "gloo"], "invalid choice: 'gloo'"),
        ([ONE, "--out", "x", "--target", "v3"], "Expected a target among mfsdp2, mfsdp1, native;"),
        ([ONE, "--out", "x", "--megatron", "none"], "a Megatron tree with megatron/core, got none"),
        pytest.param(
            [ONE, "--out", "x", *ALONE, "--ranks", "1024", "--rank", "5"],
            "expected 1 CUDA GPU",
            marks=pytest.mark.skipif(HAS_GPU, reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_exits_2_in_one_line(
    words: list[object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is the machine's fault, and no folder is made for it."""
    try:
        status = main(["trace", *map(str, words)])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert said in error
    assert error.count("\n") == 1
    assert not Path("x").exists()


def test_scenarios_of_one_launch_share_their_parallel_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Process groups are made once."""
    other = tmp_path / "other.toml"
    text = ONE.read_text().replace("expert-model-parallel-size = 2", "")
    text = text.replace("[parallel]", "[parallel]\nexpert-model-parallel-size = 1")
    other.write_text(text.replace("= true", "= false"))
    assert main(["trace", str(ONE), str(other), "--out", str(tmp_path / "out")]) == 2
    assert "Expected equal expert_model_parallel_size in all" in capsys.readouterr().err


def test_an_older_trace_of_more_ranks_leaves_no_files_behind(tmp_path: Path) -> None:
    """A reader takes every rank file of a folder."""
    from real.gpu.trace import open_file

    for rank in range(3):
        trace_path(tmp_path, rank).write_text("old")
    for rank in (1, 0):
        open_file(tmp_path, rank, 2).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0000.jsonl", "rank0001.jsonl"]


@pytest.mark.parametrize("command", ["trace", "bench"])
def test_a_rank_that_stands_alone_is_none_of_torchrun(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes would each be told that they are that rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [command, *ALONE, "--ranks", "2", "--rank", "0"]
    assert main([*words, *(["--out", "x"] if command == "trace" else [])]) == 2
    said = "real: Expected --peers loopback without torchrun, got one process of 2.\n"
    assert capsys.readouterr().err == said


def test_a_comparison_with_loopback_peers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Its losses would agree with nothing, or by chance."""
    assert main(["parity", *ALONE, "--world-size", "2", "--rank", "0"]) == 2
    error = capsys.readouterr().err
    assert "with loopback peers losses mean nothing" in error
    assert error.count("\n") == 1


def test_a_rank_that_stands_alone_leaves_its_own_file_only(tmp_path: Path) -> None:
    """Others of an older run are not of its job."""
    from real.gpu.trace import open_file

    for rank in range(3):
        trace_path(tmp_path, rank).write_text("old")
    open_file(tmp_path, 1, 2, is_alone=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0001.jsonl"]


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    """And the message names it."""
    from real.gpu.trace import open_file

    (tmp_path / "file").write_text("")
    with pytest.raises(ScenarioError, match="Expected a folder to write to"):
        open_file(tmp_path / "file" / "out", 0, Scenario().world_size)
