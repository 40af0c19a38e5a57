"""The command lines of runs for shapes, of the fit and of the verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from real.cli import main as real_main
from real.trace import read_traces
from sim.cli import main
from sim.commands.common import FIXTURES

GRID = FIXTURES / "configs" / "grid"
SMALL = ["--num-layers", "1", "--hidden-size", "64", "--seq-length", "32", "--vocab-size", "64"]


@pytest.mark.slow
def test_a_run_for_shapes_says_that_it_compares_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody should take its losses for a result."""
    config = str(GRID / "10-l2-h1024-s1024-m4.toml")
    out = str(tmp_path / "trace")
    arguments = ["run", config, "--shapes-only", "--no-fsdp", *SMALL, "--out", out, "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "shapes only"
    kernels = [r for r in read_traces(tmp_path / "trace")[0].records if r["op"] == "kernel"]
    assert all("shapes" in record for record in kernels)
    assert any(record["name"] == "te:expert_gemm_TN" for record in kernels)
    assert any(record.get("backward") for record in kernels)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-fsdp"], "--shapes-only"),
        (["--routing-imbalance", "1.5"], "--shapes-only"),
        (["--shapes-only", "--routing-imbalance", "3"], "below 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is loaded."""
    assert main(["run", *flags]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


def test_a_verdict_needs_a_measured_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of another kind, and a configuration that was not measured."""
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    assert main(["accuracy", str(other)]) == 2
    assert "real bench --grid" in capsys.readouterr().err
    line = {"config": "a", "variant": "b", "step_ms": 1.0, "peak_bytes_above_rest": 1}
    other.write_text(json.dumps(line) + "\n")
    assert main(["accuracy", str(other), "--fit", "a:c"]) == 2
    assert "a:c" in capsys.readouterr().err


@pytest.mark.slow
def test_a_grid_of_more_ranks_is_predicted_with_as_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of the bench says on how many ranks it was measured; the model's file says two."""
    grid, traces, measured = tmp_path / "grid", tmp_path / "traces", tmp_path / "grid.jsonl"
    grid.mkdir()
    shutil.copy(FIXTURES / "configs" / "conformance" / "combined-1.toml", grid / "tiny.toml")
    line = {"config": "tiny", "variant": "mfsdp_combined", "step_ms": 9.0, "world_size": 4}
    line["peak_bytes_by_rank"] = [1000, 3000]
    measured.write_text(json.dumps(line) + "\n")
    flags = ["--grid", str(grid), "--traces", str(traces), "--json"]
    assert main(["accuracy", str(measured), *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)["configurations"]
    assert found["peak_bytes"] == 2000
    assert found["predicted_ms"] > 0
    assert len(read_traces(traces / "tiny-mfsdp_combined-4")) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "2"], "Expected --out and --rounds with --grid only."),
        (["--grid", "--rounds", "0"], "Expected --rounds of 1 or more, got 0."),
        (["--repeats", "0"], "Expected --repeats of 1 or more, got 0."),
    ],
)
def test_a_bench_that_measures_nothing_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a GPU is looked for."""
    assert real_main(["bench", *flags]) == 2
    assert capsys.readouterr().err == f"real: {message}\n"


def test_a_grid_is_written_after_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later round takes the place of an earlier one in the file, and is printed alone."""
    from real.gpu import bench, world

    out = tmp_path / "grid.jsonl"
    seen: list[int] = []

    def run_grid(scenarios: dict[str, object], variants: object, **given: Any) -> None:  # noqa: ANN401
        for step_ms in (1.0, 2.0):
            for name in list(scenarios)[:2]:
                given["report"](name, {"mfsdp_plain": {"step_ms": step_ms}})
                seen.append(len(out.read_text().splitlines()))

    monkeypatch.setattr(bench, "run_grid", run_grid)
    monkeypatch.setattr(world, "scenario_of_launch", lambda scenario: scenario)
    flags = ["--grid", "--rounds", "2", "--out", str(out), "--timeout", "0"]
    assert real_main(["bench", *flags]) == 0
    assert seen == [1, 2, 2, 2]
    assert [json.loads(line)["step_ms"] for line in out.read_text().splitlines()] == [2.0, 2.0]
    assert capsys.readouterr().out == out.read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_a_cost_file_needs_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another JSON file is refused in one line."""
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert main(["fit", str(other), "--out", str(tmp_path / "x.toml")]) == 2
    assert "Expected measurements" in capsys.readouterr().err


def test_factors_have_names_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt factor changes nothing silently."""
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps({"small": {}}))
    assert main(["fit", str(raw), "--out", str(tmp_path / "x"), "--factors", "hots=2"]) == 2
    assert "--factors" in capsys.readouterr().err


def test_the_grid_covers_what_the_model_is_judged_on() -> None:
    """Hidden sizes, layers, sequences and microbatches from small to large."""
    from real.config import load_scenario

    scenarios = [load_scenario(path) for path in sorted(GRID.glob("*.toml"))]
    assert {s.hidden_size for s in scenarios} == {1024, 2048, 4096}
    assert {1024, 2048, 4096} == {s.seq_length for s in scenarios}
    assert {1, 2, 4, 8} == {s.num_microbatches for s in scenarios}
    assert min(s.num_layers for s in scenarios) == 2
    assert max(s.num_layers for s in scenarios) == 8


def test_a_fit_starts_from_a_cost_file_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, whether the measurements or the file to start from lack something."""
    raw, base, out = tmp_path / "raw.json", tmp_path / "base.toml", tmp_path / "out.toml"
    raw.write_text(json.dumps({"small": {}, "machine": {}}))
    assert main(["fit", str(raw), "--out", str(out)]) == 2
    assert "'nodes'" in capsys.readouterr().err
    raw.write_text(json.dumps({"small": {}, "machine": {}, "nodes": {}}))
    base.write_text('description = "nothing else"\n')
    assert main(["fit", str(raw), "--base", str(base), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(base) in line
    assert not out.exists()
