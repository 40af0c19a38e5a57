"""Hooks are installed once and fire once a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.hygiene import check_hygiene

Story = Callable[..., Trace]


def _rules(trace: Trace) -> list[str]:
    return [v.rule for v in check_hygiene([trace])]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("install 0", []),
        ("install 0\ninstall 1", []),
        ("install 0\nremove 0\ninstall 0", []),
        ("install 0\ninstall 0", ["I16"]),
        ("install 0\nremove 1\ninstall 0", ["I16"]),
    ],
)
def test_a_model_gets_its_hooks_once(story: Story, text: str, rules: list[str]) -> None:
    """A second installation on the same model needs a removal before it."""
    assert _rules(story(text)) == rules


PAIR = """
    hook pre_forward layers.0
    0: unshard layers.0
    0: wait 5
    hook pre_forward layers.0
    0: again layers.0
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (PAIR, ["I16"]),
        (PAIR.replace("pre_forward", "post_forward"), ["I16"]),
        (PAIR.replace("0: wait 5", "0: mm 1 -> 2"), []),
        (PAIR.replace("0: wait 5", "end attn forward"), []),
        (PAIR.replace("0: wait 5", "hook pre_forward layers.1"), []),
        (PAIR.replace("pre_forward", "pre_backward"), []),
    ],
    ids=["twins", "after", "computes between", "another node", "another module", "two outputs"],
)
def test_one_call_fires_a_hook_once(story: Story, text: str, rules: list[str]) -> None:
    """Twins have nothing but the first one's own work between them."""
    assert _rules(story(text)) == rules


def test_all_twins_of_a_hook_are_one_report(story: Story) -> None:
    """With the number of them."""
    [violation] = check_hygiene([story(PAIR + "0: mm 1 -> 2" + PAIR)])
    assert violation.message == (
        "Hook pre_forward of layers.0 fires twice for one call, 2 time(s) in the trace."
    )


def test_without_kernels_a_module_called_twice_in_a_row_is_no_fault(story: Story) -> None:
    """Nothing else is recorded between its calls; only all of them in pairs are."""
    assert _rules(story(PAIR + "end attn forward\nhook pre_forward layers.0")) == []


def test_a_module_always_called_twice_in_a_row_is_no_fault_beside_others(story: Story) -> None:
    """MTP's output layer is; a second installation would double the others' hooks too."""
    assert _rules(story(PAIR + "end attn forward\nhook pre_forward layers.1")) == []
