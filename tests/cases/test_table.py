"""The whole table: every case is caught by name and no twin raises an alarm."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.cases import Case, Shown, Verdict, all_cases, judge
from sim.cases.listing import as_markdown
from sim.checks import Violation
from sim.cli import main
from sim.commands.cases import format_table, summarize

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_case_is_caught_and_every_twin_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """A case that is missed is a way to go wrong that the bench would let pass."""
    status = main(["cases", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["missed"] == []
    assert summary["false_alarms"] == []
    assert summary["total"] == len(all_cases())
    assert summary["caught"] == summary["total"] - len(summary["not_on_cpu"])
    assert status == 0


def test_what_a_cpu_cannot_show_is_what_needs_a_gpu() -> None:
    """The list grows only with a reason that a reader can check."""
    assert {case.id for case in all_cases() if case.not_on_cpu is not None} <= {"D16", "H4"}


def test_ids_are_distinct_and_in_order() -> None:
    """The command line and the list name cases by them."""
    ids = [case.id for case in all_cases()]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert ids == sorted(ids, key=lambda name: (name[0], int(name[1:])))
    assert all(re.fullmatch(r"[A-H]\d+", name) for name in ids)


def test_every_case_has_a_public_source_and_says_what_it_shows() -> None:
    """A reader has to be able to look the fault up."""
    for case in all_cases():
        assert re.fullmatch(r"https://\S+|.+#\d+", case.source), case.id
        assert case.title.endswith("."), case.id
        if case.not_on_cpu is None:
            assert case.shown is not None, case.id
            assert case.defect, case.id
            assert case.twin, case.id


def test_the_list_in_the_documents_is_the_one_in_the_code() -> None:
    """`python -m sim cases --list > docs/cases.md` writes it."""
    assert (ROOT / "docs" / "cases.md").read_text(encoding="utf-8") == as_markdown(all_cases())


# -- judging ----------------------------------------------------------------------------------


def a_case(**changes: Any) -> Case:  # noqa: ANN401 - fields of the class
    fields: dict[str, Any] = {
        "id": "X1",
        "source": "https://example.org",
        "title": "Something.",
        "rules": ("I1",),
        "unit": "layer",
        "shown": Shown.TRACE,
        "faulty": lambda: [Violation(rule="I1", rank=0, message="Gone.", unit="layer")],
        "correct": list,
    }
    return Case(**{**fields, **changes})


def finds(**fields: Any) -> Callable[[], list[Violation]]:  # noqa: ANN401 - fields of the class
    given: dict[str, Any] = {"rule": "I1", "rank": 0, "message": "Gone.", "unit": "layer", **fields}
    return lambda: [Violation(**given)]


def test_the_right_rule_and_unit_are_a_catch() -> None:
    """Nothing else is asked for when the fault has no node."""
    assert judge(a_case()).caught == finds()()[0]


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({}, {"rule": "I2"}),
        ({}, {"unit": "other"}),
        ({}, {"unit": None}),
        ({"unit": None}, {"unit": "layer"}),
        ({"node": "mlp forward"}, {"node": "mlp backward"}),
        ({"microbatch": 1}, {"microbatch": 0}),
        ({"microbatch": 0}, {}),
    ],
    ids=["rule", "unit", "no unit", "a unit too many", "node", "microbatch", "no microbatch"],
)
def test_anything_else_is_a_miss(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """An expectation has no wild card."""
    verdict = judge(a_case(**expected, faulty=finds(**found)))
    assert verdict.caught is None
    assert len(verdict.instead) == 1


def test_a_twin_that_is_not_silent_is_a_false_alarm() -> None:
    """Whatever it says: the twin has nothing wrong with it."""
    verdict = judge(a_case(correct=finds(rule="I20", unit=None)))
    assert verdict.caught is not None
    assert len(verdict.false_alarms) == 1


def test_a_variant_that_cannot_run_is_a_miss_and_an_alarm() -> None:
    """A broken case must not pass, and must not end the table."""

    def broken() -> list[Violation]:
        raise RuntimeError("No such name.")

    verdict = judge(a_case(faulty=broken, correct=broken))
    assert verdict.caught is None
    assert verdict.instead == ("RuntimeError: No such name.",)
    assert verdict.false_alarms == ("RuntimeError: No such name.",)


def test_a_case_needs_both_runs_or_a_reason() -> None:
    """A fault without its twin proves nothing."""
    with pytest.raises(ValueError, match="Expected case X1 to have both runs, or a reason"):
        a_case(correct=None)
    with pytest.raises(ValueError, match="Expected case X1 to have both runs, or a reason"):
        a_case(not_on_cpu="needs a GPU")


def test_the_summary_counts_what_the_table_shows() -> None:
    """`--json` is for machines that gate on it."""
    cases = [
        a_case(),
        a_case(id="X2", faulty=finds(rule="I2")),
        a_case(id="X3", correct=finds()),
        a_case(id="X4", faulty=None, correct=None, not_on_cpu="needs a GPU"),
    ]
    verdicts = [judge(case) for case in cases]
    assert summarize(verdicts) == {
        "total": 4,
        "caught": 2,
        "missed": ["X2"],
        "not_on_cpu": ["X4"],
        "false_alarms": ["X3"],
    }
    table = format_table(cases, verdicts)
    assert "MISSED" in table
    assert "FALSE ALARM" in table
    assert table.endswith("2 of 4 caught, 1 missed, 1 not on a CPU, 1 false alarms")
    assert format_table([], []).endswith("0 of 0 caught, 0 missed, 0 not on a CPU, 0 false alarms")
    assert Verdict(id="X5").caught is None


# -- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Z9"], "sim: Expected ids of cases, as A1, A2, A4; got 'Z9'.\n"),
        (["A1", "a2"], "sim: Expected ids of cases, as A1, A2, A4; got 'a2'.\n"),
        (["--jobs", "0"], "sim: Expected --jobs of 1 or more, got 0.\n"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was expected and what was got."""
    assert main(["cases", *words]) == 2
    assert capsys.readouterr() == ("", message)


def test_chosen_cases_are_listed_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """For a reader who wants to know what a case is."""
    assert main(["cases", "--list", "--json", "B1", "A1"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in listed] == ["A1", "B1"]
    assert listed[0]["rules"] == ["I1", "I3"]
