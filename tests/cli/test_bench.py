"""`python -m sim bench`: one JSON line a figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from sim.bench.figure import make_figure
from sim.commands.bench import SUITES

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome


@pytest.mark.slow
def test_each_line_is_a_figure(sim: Callable[..., Outcome]) -> None:
    """What a program reads needs no other line than these."""
    done = sim("bench", "trace")
    (line,) = done.out.splitlines()
    figure = json.loads(line)
    assert list(figure) == ["name", "value", "unit", "peer", "peer_value", "ratio"]
    assert figure["value"] < figure["peer_value"] == 150


def test_a_figure_carries_its_ratio() -> None:
    figure = make_figure("a", 2.00004, "s", peer="b", peer_value=4.0)
    assert (figure["value"], figure["ratio"]) == (2.0, 0.5)


def test_an_unknown_suite_is_refused(sim: Callable[..., Outcome]) -> None:
    done = sim("bench", "raec")
    assert done.status == 2
    assert done.err == f"sim: Expected suites among {', '.join(SUITES)}; got 'raec'.\n"
