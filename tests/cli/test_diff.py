"""`python -m sim diff` as a shell sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from real.trace import JsonlSink, OpKind, Recorder, trace_path

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

Sim = Callable[..., "Outcome"]


def write(folder: Path, *, module: str = "fc", num_ranks: int = 1) -> Path:
    """Writes a small trace and returns its folder."""
    folder.mkdir()
    for rank in range(num_ranks):
        recorder = Recorder(JsonlSink(trace_path(folder, rank)))
        recorder.header(rank=rank, world_size=num_ranks, scenario={"seed": 1})
        recorder.begin_step(0)
        recorder.record(OpKind.HOOK, point="pre_forward", module=module, unit="layers.0")
        recorder.close()
    return folder


@pytest.mark.parametrize("flags", [[], ["--canonical"]])
def test_equal_traces_exit_0(flags: list[str], sim: Sim, tmp_path: Path) -> None:
    """And say how much was compared."""
    outcome = sim("diff", *flags, write(tmp_path / "a"), write(tmp_path / "b"))
    assert (outcome.status, outcome.out) == (0, "equal: 3 lines of 1 ranks\n")


def test_different_traces_exit_1_and_show_where(sim: Sim, tmp_path: Path) -> None:
    """Rank, step and both lines."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", module="other")
    outcome = sim("diff", "--canonical", "--width", "50", a, b)
    assert outcome.status == 1
    assert "rank 0, step 0:" in outcome.out
    assert "> " in outcome.out
    assert "hook pre_forward fc of layers.0" in outcome.out
    assert "hook pre_forward other of layers.0" in outcome.out


def test_json_names_the_difference(sim: Sim, tmp_path: Path) -> None:
    """For machines: the number of each record in its file."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", module="other")
    outcome = sim("diff", "--canonical", "--json", a, b)
    assert outcome.status == 1
    result = json.loads(outcome.out)
    assert result["equal"] is False
    (difference,) = result["differences"]
    assert [row for row in difference["rows"] if row[0] != row[1]] == [
        [
            {"seq": 2, "text": "hook pre_forward fc of layers.0"},
            {"seq": 2, "text": "hook pre_forward other of layers.0"},
        ]
    ]


def test_what_cannot_be_compared_exits_2_in_one_line(sim: Sim, tmp_path: Path) -> None:
    """No trace at all, and worlds of different size."""
    a, two = write(tmp_path / "a"), write(tmp_path / "two", num_ranks=2)
    for words, said in (
        ((a, tmp_path / "none"), "expected rank*.jsonl files"),
        ((a, two), "equally many ranks, got 1 and 2"),
    ):
        outcome = sim("diff", *words)
        assert outcome.status == 2
        assert said in outcome.err
        assert outcome.err.count("\n") == 1
