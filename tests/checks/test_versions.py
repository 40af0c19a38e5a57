"""Versions of full weights from gather to gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.versions import check_versions

Story = Callable[..., Trace]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("version layers.0 3\nversion layers.1 4\nversion layers.0 3", []),
        ("version layers.0 3\nversion layers.0 4", [("I21", "layers.0", 2)]),
        ("version layers.0 3\nversion layers.0 4\nversion layers.0 5", [("I21", "layers.0", 2)]),
    ],
    ids=["equal", "moved", "moved twice is one fault"],
)
def test_a_gather_moves_no_version(
    story: Story, text: str, found: list[tuple[str, str, int]]
) -> None:
    """Autograd refuses a backward over weights that are newer than what it saved."""
    assert [(v.rule, v.unit, v.seq) for v in check_versions([story(text)])] == found
