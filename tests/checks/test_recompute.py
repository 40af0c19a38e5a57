"""A recomputed forward changes nothing but its own gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.recompute import check_recompute

Story = Callable[..., Trace]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("0: unshard layers.0", None),
        ("phase layers.0 resting > backward by use in backward", None),
        ("0: unshard layers.1", "The recomputed forward of layers.0 gathers unit layers.1 ahead."),
        ("0: reshard layers.0", "The recomputed forward of layers.0 releases unit layers.0."),
        (
            "phase layers.0 backward > forward and backward by use in forward",
            (
                "The recomputed forward of layers.0 takes unit layers.0 from phase 'backward' to "
                "'forward and backward'."
            ),
        ),
    ],
    ids=["own gather", "backward use", "prefetch", "release", "forward use"],
)
def test_a_forward_hook_inside_a_backward(story: Story, what: str, message: str | None) -> None:
    """The same outside is what a forward does."""
    found = check_recompute([story(f"hook pre_forward layers.0 inside\n{what}")])
    assert [(v.rule, v.message) for v in found] == ([("I17", message)] if message else [])
    assert check_recompute([story(f"hook pre_forward layers.0\n{what}")]) == []


@pytest.mark.parametrize(
    "between", ["hook pre_backward layers.0 inside", "end attn backward", "0: fence"]
)
def test_what_comes_after_the_hook_is_not_its_doing(story: Story, between: str) -> None:
    """The next hook, the end of the node, the end of the step."""
    trace = story(f"hook pre_forward layers.0 inside\n{between}\n0: reshard layers.0")
    assert check_recompute([trace]) == []
