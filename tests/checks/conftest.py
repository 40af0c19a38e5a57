"""The text form of small traces, for every test of a check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from tests.checks import stories


@pytest.fixture
def story() -> Callable[..., Trace]:
    """Makes a trace of one rank from the lines of a text (tests/checks/stories.py)."""
    return stories.story
