"""Every trace with a known fault is reported for that fault and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.trace import read_traces
from sim.checks import check_traces
from sim.cli import main
from tests.checks.broken import FOLDER, STORIES, files_of, unreadable

NAMES = sorted(STORIES)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    """A check that sees too much is as bad as one that sees too little."""
    found = check_traces(read_traces(FOLDER / name))
    assert [violation.rule for violation in found] == [name.partition("-")[0]], found


def test_every_rule_has_a_trace_that_breaks_it() -> None:
    """A rule without one might be judged by nobody."""
    rules = {name.partition("-")[0] for name in NAMES}
    assert rules == {f"I{number}" for number in range(1, 22)}


def test_the_files_are_what_the_stories_tell() -> None:
    """Else a change of the stories would test nothing: run python -m tests.checks.broken."""
    wanted = {**{name: files_of(name) for name in NAMES}, **unreadable()}
    on_disk = {
        folder.name: {
            path.relative_to(folder): path.read_bytes() for path in sorted(folder.iterdir())
        }
        for folder in sorted(FOLDER.iterdir())
        if folder.is_dir()
    }
    assert on_disk == wanted


@pytest.mark.parametrize("name", sorted(unreadable()))
def test_what_is_no_trace_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2, so that a script can tell it from a fault that was found."""
    status = main(["check", str(FOLDER / name)])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert str(FOLDER / name) in printed.err


def test_a_report_on_the_command_line_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line of each is a command."""
    folder = str(FOLDER / "I9-gathered-before-the-optimizer")
    status = main(["check", folder])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[:5] == [
        (
            "I9: Unit decoder.layers.2 is gathered in no order with the optimizer's write of its "
            "weights."
        ),
        "  at rank 0, unit decoder.layers.2, record 6",
        "  first:  optimizer writes (record 5, stream 0 (compute))",
        "  second: all_gather of decoder.layers.2 reads (record 6, stream 1 (all-gather))",
        (
            "  missing: stream 1 (all-gather) never waits for the optimizer step on "
            "stream 0 (compute) in record 5"
        ),
    ]
    assert lines[5] == f"  replay: python -m sim check {folder}"


def test_a_cut_trace_is_judged_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run leaves half a line at the end; it says that the end is missing."""
    [(path, content)] = files_of("I9-gathered-before-the-optimizer").items()
    (tmp_path / path).write_bytes(content[:-20])
    assert main(["check", str(tmp_path)]) == 1
    assert "cut short on rank 0" in capsys.readouterr().out
