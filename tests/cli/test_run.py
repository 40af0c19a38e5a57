"""`python -m sim run`: what it prints and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pytest_mock import MockerFixture

from real.config import Scenario, flag
from real.trace import read_traces
from sim.session.megatron import megatron_on_fake_cuda

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

SCENARIO = """
[model]
num-layers = 3
[parallel]
world-size = 2
[schedule]
num-microbatches = 2
[training]
train-iters = 1
seed = 5
"""
SMALL = "--num-layers 1 --ranks 2 --num-microbatches 1 --steps 1".split()


def test_json_has_everything_that_a_script_needs(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """One object on one line, and nothing else."""
    status, out, err = sim("run", *SMALL, "--json", "--out", tmp_path)
    assert (status, err, out.count("\n")) == (0, "", 1)
    result = json.loads(out)
    assert result.keys() >= {
        "passed",
        "ranks",
        "losses",
        "reference_losses",
        "max_grad_rel_error",
        "worst_parameter",
        "num_records",
        "wall_s",
        "trace",
    }
    assert (result["passed"], result["ranks"], result["trace"]) == (True, 2, str(tmp_path))
    assert result["losses"] == result["reference_losses"]
    assert 0 < result["max_grad_rel_error"] < 1e-2
    assert result["worst_parameter"]
    # The last record, the mark of a complete trace, and the header are counted as well.
    assert result["num_records"] == sum(len(t.records) + 1 for t in read_traces(tmp_path))


def test_flags_override_the_file(sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """What is given neither in the file nor as a flag has its default."""
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    words = ["--num-layers", 1, "--num-microbatches", 1, "--prefetch", "both"]
    assert sim("run", path, *words, "--json", "--out", tmp_path / "trace").status == 0
    expected = Scenario(
        num_layers=1, world_size=2, num_microbatches=1, train_iters=1, seed=5, prefetch="both"
    )
    assert [trace.scenario for trace in read_traces(tmp_path / "trace")] == [expected.as_dict()] * 2


def test_a_run_that_agrees_prints_a_table_and_nothing_on_stderr(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Progress is for terminals; a log keeps every carriage return."""
    status, out, err = sim("run", *SMALL, "--out", tmp_path)
    assert (status, err) == (0, "")
    assert "MFSDP v2 under combined 1F1B: 2 ranks, EP2 x expert-DP 1" in out
    assert re.search(r"^ +0 +\d\.\d{8} +\d\.\d{8} +0\.0e\+00$", out, re.MULTILINE)
    assert out.endswith("all agrees with the reference\n")
    assert "\r" not in out


def test_an_old_trace_in_the_folder_is_replaced(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Ranks of an earlier, larger run would be read with this one's."""
    (tmp_path / "rank0007.jsonl").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert sim("run", *SMALL, "--json", "--out", tmp_path).status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "rank0000.jsonl",
        "rank0001.jsonl",
    ]


@pytest.fixture
def undivided_experts(mocker: MockerFixture) -> None:
    """A mutant: gradients of experts are summed over expert-parallel ranks and not divided."""
    with megatron_on_fake_cuda():
        from real.mcore import schedule
    released = schedule.shard_model

    def shard(*args: object, **kwargs: object) -> dict[str, int]:
        return dict.fromkeys(released(*args, **kwargs), 1)  # type: ignore[arg-type]

    mocker.patch.object(schedule, "shard_model", shard)


@pytest.mark.usefixtures("undivided_experts")
def test_a_run_that_differs_says_what_and_ends_with_1(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """The loss of the first step is right to the last bit; the gradient is not."""
    status, out, err = sim("run", *SMALL, "--out", tmp_path)
    assert (status, err) == (1, "")
    assert "all agrees" not in out
    table, problems = out.split("DOES NOT AGREE:\n")
    assert re.search(r"0\.0e\+00$", table, re.MULTILINE)
    assert re.search(
        r"^Expected gradients within 0\.01 of the reference, got 1\.\d\de\+00 in "
        r"decoder\.layers\.0\.mlp\.experts\.\S+ on rank \d\.$",
        problems,
        re.MULTILINE,
    )


@pytest.mark.usefixtures("undivided_experts")
def test_json_of_a_run_that_differs_lists_the_problems(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """A script sees the same as a reader."""
    status, out, _ = sim("run", *SMALL, "--json", "--out", tmp_path)
    result: dict[str, Any] = json.loads(out)
    assert (status, result["passed"]) == (1, False)
    # Whether the norm is off by enough as well depends on the first weights, so on torch's version.
    assert result["problems"][0].startswith("Expected gradients within 0.01 of the reference")


def test_a_rank_that_fails_is_named_with_the_command_that_repeats_it(
    sim: Callable[..., Outcome], tmp_path: Path, mocker: MockerFixture
) -> None:
    """The other ranks only wait for it."""
    with megatron_on_fake_cuda():
        from real.mcore import schedule
    mocker.patch.object(schedule, "shard_model", side_effect=KeyError("lost"))
    words = ["run", *SMALL, "--out", tmp_path]
    status, out, err = sim(*words)
    assert (status, out) == (1, "")
    assert re.match(r"sim: Rank \d raised KeyError: 'lost'", err)
    assert f"Replay: python -m sim {' '.join(map(str, words))}\n" in err


def test_help_names_every_scenario_key(sim: Callable[..., Outcome]) -> None:
    """There is no other list of them."""
    status, out, err = sim("run", "--help")
    assert (status, err) == (0, "")
    missing = [spec.name for spec in fields(Scenario) if f"--{flag(spec.name)}" not in out]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "steps"), [("none", set()), ("step", {1}), ("all", {0, 1})])
def test_kernels_are_recorded_in_the_steps_asked_for(
    sim: Callable[..., Outcome], tmp_path: Path, choice: str, steps: set[int]
) -> None:
    small = ("--ranks", 2, "--num-layers", 1, "--num-microbatches", 1, "--steps", 2)
    assert sim("run", *small, "--kernels", choice, "--out", tmp_path).status == 0
    step, seen = -1, set()
    for record in read_traces(tmp_path)[0].records:
        if record["op"] == "step" and record["event"] == "begin":
            step = record["step"]
        if record["op"] == "kernel":
            seen.add(step)
    assert seen == steps


# -- rules that must be judged ------------------------------------------------------------------


def test_a_run_says_what_its_trace_could_not_show(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Nothing is captured in it; all else is there, and gradients are judged by value."""
    outcome = sim("run", *SMALL, "--require", "I1,I14,I20", "--out", tmp_path)
    assert outcome.status == 0
    assert "\nnot judged: I19 (no CAPTURE records)\n" in outcome.out


def test_a_required_rule_that_a_run_cannot_show_fails_it(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """As a script sees it: the problem is one of the run's."""
    outcome = sim("run", *SMALL, "--require", "I19", "--json", "--out", tmp_path)
    assert outcome.status == 1
    result = json.loads(outcome.out)
    assert result["problems"] == ["required and not judged: I19 (no CAPTURE records)"]
    assert (result["passed"], result["not_judged"]) == (False, {"I19": "no CAPTURE records"})
    assert (result["required"], result["incomplete"]) == (["I19"], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--require", "I22"], "Expected rules I1 to I21 in --require, got 'I22'."),
        (["--require", "I1", "--world", "gloo"], "a run whose trace is judged, got --world gloo."),
        (["--require", "I1", "--shapes-only"], "a run whose trace is judged, got --shapes-only."),
    ],
)
def test_a_rule_that_no_run_can_show_is_refused_in_one_line(
    words: list[str], said: str, sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Before anything runs."""
    outcome = sim("run", *SMALL, *words, "--out", tmp_path)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_failed_run_is_judged_and_says_in_whose_code_it_failed(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """With the error alone a reader would have to run `sim check`, and to search for the line."""
    fault = "lose-callback rank=1 unit=decoder.layers.0 point=post_gradient"
    size = "--num-layers 2 --ranks 2 --num-microbatches 2 --steps 1".split()
    status, out, err = sim("run", *size, "--fault", fault, "--json", "--out", tmp_path)
    assert status == 1
    failure = json.loads(out)
    assert (failure["passed"], failure["rank"], failure["kind"]) == (False, 1, "a rank raised")
    assert [(v["rule"], v["unit"]) for v in failure["violations"]] == [("I5", "decoder.layers.0")]
    assert re.fullmatch(
        r"real/hooks/scheduler\.py:\d+ in _zero_fill: raise ContractError\(",
        failure["traceback"][-1],
    )
    assert f"  raised in {failure['traceback'][-1]}\n" in err
