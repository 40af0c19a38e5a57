"""What the checks could judge: a trace without records breaks no rule, and shows none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from real.trace import OpKind, Trace, read_traces, trace_path
from sim.checks import CHECKS, JUDGES, RULES, judge
from sim.checks.rules import text_of_missing
from sim.cli import main
from tests.checks.broken import FOLDER, STORIES, files_of

Story = Callable[..., Trace]

WRITTEN_BY_OUR_HOOKS = {
    OpKind.HOOK,
    OpKind.PHASE,
    OpKind.UNSHARD,
    OpKind.RESHARD,
    OpKind.REDUCE,
    OpKind.GRADIENTS,
    OpKind.UNIT,
    OpKind.PARAMETER,
    OpKind.INSTALL,
    OpKind.REMOVE,
    OpKind.WEIGHT_VERSION,
    OpKind.ZERO_FILL,
    OpKind.FENCE,
    OpKind.OPTIMIZER_STEP,
    OpKind.STREAM_ROLE,
    OpKind.NAME,
    OpKind.NVTX_PUSH,
    OpKind.NVTX_POP,
}


def stripped(trace: Trace) -> Trace:
    """Returns what is left of a trace when nobody tells what the product does."""
    records = [record for record in trace.records if record["op"] not in WRITTEN_BY_OUR_HOOKS]
    return dataclasses.replace(trace, records=records)


# -- what is not there is not judged ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_fault_that_is_not_told_is_not_passed_over(name: str) -> None:
    """Without our hooks' records its rule is broken all the same, or said to be not judged."""
    rule = name.partition("-")[0]
    verdict = judge([stripped(trace) for trace in read_traces(FOLDER / name)])
    broken = {violation.rule for violation in verdict.violations}
    assert rule in broken or verdict.reach.not_judged[rule].startswith("no ")


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_rule_that_is_broken_is_judged(name: str) -> None:
    """Whatever else is missing: who is found out was looked at."""
    verdict = judge(read_traces(FOLDER / name))
    assert {v.rule for v in verdict.violations} == {name.partition("-")[0]}
    assert name.partition("-")[0] in verdict.reach.judged


def test_a_trace_of_nothing_shows_no_rule(story: Story) -> None:
    """Every rule says what it would take."""
    reach = judge([story("step begin 0\nstep end 0")]).reach
    assert (reach.judged, list(reach.not_judged)) == ((), list(RULES))
    assert reach.not_judged["I5"] == "no counted PARAMETER, HOOK or REDUCE records"
    assert reach.not_judged["I11"] == "no COLLECTIVE records or traces of other ranks"
    assert reach.not_judged["I19"] == "no CAPTURE records"
    assert judge([]).reach.not_judged["I1"] == "no traces"


def test_a_rule_that_one_rank_cannot_show_is_not_judged(story: Story) -> None:
    """The rank without records may be the one that breaks it."""
    reach = judge([story("version a 3"), story("step begin 0", rank=1)]).reach
    assert reach.not_judged["I21"] == "no WEIGHT_VERSION records on rank 1"


def test_what_only_some_checks_see_is_judged_in_part(story: Story) -> None:
    """The order of a gradient's reader is there; a late reduction would not be seen."""
    reach = judge([story("2: reduce_scatter of a 6 -> 7\n0: wait stream 2\n0: grad_read")]).reach
    assert "I8" in reach.judged
    assert reach.partly["I8"].startswith("no ")
    assert "REDUCE" in reach.partly["I8"]


def test_a_part_of_a_rule_does_not_make_it_judged(story: Story) -> None:
    """Units taken as unsharded say nothing of the order of reads."""
    reach = judge([story("1: unshard a\n1: reshard a")]).reach
    assert "I2" in reach.judged
    assert "I1" in reach.not_judged


def test_what_is_judged_elsewhere_counts(story: Story) -> None:
    """A run compares gradients by value, which no trace has."""
    told = story("step begin 0")
    assert "I13" in judge([told], also=("I13",)).reach.judged
    assert "I13" in judge([told]).reach.not_judged


def test_declarations_without_hooks_that_tell_are_no_missing_gradients(story: Story) -> None:
    """A tree whose completions nobody announces would else seem to reduce without gradients."""
    told = story("""
        unit a
        parameter a.w of a x 1
        step begin 0
        2: reduce a
        step end 0
    """)
    verdict = judge([told])
    assert verdict.violations == ()
    assert verdict.reach.not_judged["I5"] == "no HOOK records"


def test_gradients_of_an_unknown_number_are_not_counted(story: Story) -> None:
    """A tree that declares owners may not know how often each of them fires."""
    told = story("unit a\nparameter a.w of a x ?\nhook post_gradient a.w of a\n2: reduce a")
    verdict = judge([told])
    assert verdict.violations == ()
    assert verdict.reach.not_judged["I5"] == "no counted PARAMETER records"


# -- rules as values --------------------------------------------------------------------------


def test_every_rule_has_a_check_that_sees_it_whole() -> None:
    """Else it could never be judged."""
    whole = {j.rule for judges in JUDGES.values() for j in judges if j.is_whole}
    assert whole == set(RULES)
    assert JUDGES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_check_reports_only_rules_that_it_declares(name: str) -> None:
    """Else a rule is judged that is said not to be."""
    traces = read_traces(FOLDER / name)
    for check, function in CHECKS.items():
        declared = {judges.rule for judges in JUDGES[check]}
        assert {violation.rule for violation in function(traces)} <= declared


@pytest.mark.parametrize(
    ("missing", "ranks", "text"),
    [
        (["PARAMETER"], [], "no PARAMETER records"),
        (["PARAMETER", "HOOK"], [1, 3], "no PARAMETER or HOOK records on rank 1, 3"),
        (["traces of other ranks"], [], "no traces of other ranks"),
    ],
)
def test_a_reason_is_words(missing: list[str], ranks: list[int], text: str) -> None:
    """For a reader who knows what a trace is."""
    assert text_of_missing(missing, ranks) == text


# -- on the command line ----------------------------------------------------------------------


def write(folder: Path, name: str) -> Path:
    """Writes a story's trace without what our hooks write."""
    for path, content in files_of(name).items():
        lines = [json.loads(line) for line in content.splitlines()]
        kept = [record for record in lines if record["op"] not in WRITTEN_BY_OUR_HOOKS]
        for seq, record in enumerate(kept):
            record["seq"] = seq
        kept[-1]["records"] = len(kept) - 1
        (folder / path).write_text("".join(json.dumps(record) + "\n" for record in kept))
    return folder


def test_the_report_says_what_was_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grouped by the reason."""
    folder = str(write(tmp_path, "I8-norm-before-the-last-reduction"))
    assert main(["check", folder]) == 1
    out = capsys.readouterr().out
    assert "I11, I12 (no traces of other ranks)" in out
    assert "I19 (no CAPTURE records)" in out
    assert "partly judged: I8 (no KERNEL or main gradient NAME records; no REDUCE records)" in out


def test_a_required_rule_that_is_not_judged_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A gate on a rule must not open because nobody recorded anything."""
    whole = str(FOLDER / "I21-gather-moves-the-version")
    assert main(["check", whole, "--require", "I1,I21"]) == 1
    assert "required and not judged: I1 (no " in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "got"), [("I1,I99", "'I99'"), ("i1", "'i1'"), (",", "none")])
def test_an_unknown_rule_is_refused_in_one_line(
    asked: str, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped rule would else never be required."""
    assert main(["check", str(FOLDER / "I16-installed-twice"), "--require", asked]) == 2
    printed = capsys.readouterr()
    expected = f"sim: Expected rules I1 to I21 in --require, got {got}.\n"
    assert (printed.out, printed.err) == ("", expected)


def test_json_has_what_was_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts."""
    path = trace_path(tmp_path, 0)
    path.write_bytes(files_of("I21-gather-moves-the-version")[Path(path.name)])
    assert main(["check", str(tmp_path), "--json", "--require", "I21"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["judged"] == ["I21"]
    assert result["not_judged"]["I19"] == "no CAPTURE records"
    assert (result["required"], result["incomplete"], result["passed"]) == (["I21"], [], False)


def write_whole(folder: Path, name: str = "I21-gather-moves-the-version") -> Path:
    """Writes a story's trace as it is and returns its file."""
    folder.mkdir(exist_ok=True)
    [(path, content)] = files_of(name).items()
    (folder / path).write_bytes(content.replace(b'"version":4', b'"version":3'))
    return folder / path


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (lambda lines: lines[:-1], "cut short on rank 0: no end record"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "cut short on rank 0: half a line"),
        (lambda lines: lines[:1], "nothing recorded on rank 0 but its header"),
    ],
    ids=["between lines", "in a line", "header only"],
)
def test_a_trace_that_is_not_whole_never_passes(
    tmp_path: Path,
    cut: Callable[[list[bytes]], list[bytes]],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What came after may have been broken."""
    path = write_whole(tmp_path / "a")
    whole = write_whole(tmp_path / "b")
    assert main(["check", str(path.parent)]) == 0
    path.write_bytes(b"".join(cut(path.read_bytes().splitlines(keepends=True))))
    capsys.readouterr()
    assert main(["check", str(path.parent)]) == 1
    assert f"incomplete: {reason}" in capsys.readouterr().out
    assert main(["check", str(path.parent), "--json"]) == 1
    incomplete = json.loads(capsys.readouterr().out)["incomplete"]
    assert any(text.startswith(reason) for text in incomplete)
    assert main(["diff", str(path.parent), str(path.parent)]) == 1
    out = capsys.readouterr().out
    assert f"incomplete: {path.parent}: {reason}" in out
    assert "\nnot comparable: " in out
    assert main(["diff", str(whole.parent), str(whole.parent), "--json"]) == 0
