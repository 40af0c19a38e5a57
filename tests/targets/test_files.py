"""A target in a file of one's own: taken as it is, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from real.targets import TargetError, check_target_name, find_target
from tests.targets.conftest import ROOT, Run

_ADAPTER = ROOT / "docs" / "adapters" / "plain_mfsdp.py"
_WHOLE = """
class Mine:
    name = "mine"
    title = "mine"
    missing = lambda self: []
    build = reference = lambda self, scenario: None
    alone = lambda self: None
    bounds = lambda self: {}
    points = lambda self: ()
    describe = lambda self, job, storage_id: None
"""


def _write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:Mine"


def _refusal(name: str) -> str:
    with pytest.raises(TargetError) as raised:
        find_target(name)
    return str(raised.value)


def test_a_class_in_a_file_is_a_target(tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE)
    assert find_target(name).title == "mine"


def test_the_file_runs_once(tmp_path: Path) -> None:
    """What is watched is a class of that file: with a second copy of it nothing would be seen."""
    name = _write(tmp_path, _WHOLE)
    assert type(find_target(name)) is type(find_target(name))


def test_the_name_is_checked_without_running_the_file(tmp_path: Path) -> None:
    check_target_name(_write(tmp_path, "raise SystemExit"))


@pytest.mark.parametrize("name", ["mine.py", "mine.py:", "mine.py:not-a-name"])
def test_a_file_without_a_class_name_is_refused(name: str) -> None:
    assert _refusal(name) == f"Expected as target FILE.py:CLASS, got {name!r}."


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    assert _refusal(f"{path}:Mine") == f"Expected a file with target Mine, got none at {path}."


def test_a_file_without_the_class_is_refused(tmp_path: Path) -> None:
    name = _write(tmp_path, "Mine = 3")
    assert _refusal(name) == f"Expected a class Mine in {tmp_path / 'mine.py'}, got none."


def test_what_the_class_lacks_is_named(tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE.replace("points", "spots").replace("title", "headline"))
    wanted = f"Expected {name} to have what a target has, got one without title, points."
    assert _refusal(name) == wanted


def test_a_method_that_is_a_value_is_lacking(tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE.replace("lambda self: {}", "{}"))
    assert _refusal(name).endswith("got one without bounds.")


def test_a_constructor_with_arguments_is_refused(tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE + "    def __init__(self, speed): ...\n")
    assert _refusal(name) == f"Expected {name} to take no arguments, got a constructor that does."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from megatron import nothing_of_that_name", "ImportError: cannot import name"),
        ("class Mine(", "SyntaxError: "),
    ],
)
def test_a_file_that_cannot_be_imported_costs_one_line(tmp_path: Path, text: str, why: str) -> None:
    refusal = _refusal(_write(tmp_path, text))
    assert refusal.startswith(f"Expected {tmp_path / 'mine.py'} to import, got {why}")
    assert "\n" not in refusal


def test_what_the_tree_lacks_is_named(tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE.replace("[]", "['megatron.core.hooks']"))
    wanted = f"Expected a Megatron tree that target {name!r} fits, got one without "
    assert _refusal(name) == f"{wanted}megatron.core.hooks."


@pytest.mark.slow
def test_sim_run_refuses_it_with_status_2(run_target: Callable[..., Run], tmp_path: Path) -> None:
    name = _write(tmp_path, _WHOLE.replace("build", "make"))
    run = run_target("--target", name)
    wanted = f"sim: Expected {name} to have what a target has, got one without build.\n"
    assert (run.status, run.err) == (2, wanted)


@pytest.mark.slow
def test_the_documented_adapter_is_clean_under_its_own_schedule(
    run_target: Callable[..., Run],
) -> None:
    target = f"{_ADAPTER}:PlainMfsdp"
    run = run_target("--target", target, "--no-overlap-moe-expert-parallel-comm")
    assert (run.status, run.result["problems"]) == (0, [])
    assert {trace.header["target"] for trace in run.traces} == {target}
    rules = {"I1", "I2", "I3", "I4", "I8", "I9", "I10", "I11", "I12", "I13", "I14", "I15", "I20"}
    assert rules <= set(run.result["judged"])
