"""`python -m real trace` on a machine without a GPU: bad input is answered in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.cli import main
from real.config import Scenario, ScenarioError
from real.trace import trace_path

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
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


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    """And the message names it."""
    from real.gpu.trace import open_file

    (tmp_path / "file").write_text("")
    with pytest.raises(ScenarioError, match="Expected a folder to write to"):
        open_file(tmp_path / "file" / "out", 0, Scenario().world_size)
