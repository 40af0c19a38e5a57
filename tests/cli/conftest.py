"""Calls the command line in this process, as a shell would."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from sim.cli import main


class Outcome(NamedTuple):
    """What a shell sees of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `python -m sim` with the given words; both outputs are pipes."""

    def call(*words: object) -> Outcome:
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 0
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call
