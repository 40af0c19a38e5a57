"""Traces from short stories, and a small scenario that is brought up once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

from real.config import Scenario
from real.trace import Trace
from sim.orders.order import Outcome, run_order
from sim.orders.program import build_program
from sim.quiet import quiet
from tests.checks.conftest import story

__all__ = ["story"]

SMALL = Scenario(num_layers=1, num_microbatches=1, train_iters=1, world_size=2)


@pytest.fixture
def orders() -> Callable[..., list[Outcome]]:
    """Runs the devices of some traces in so many orders."""

    def run(*traces: Trace, count: int = 40) -> list[Outcome]:
        program = build_program(traces)
        return [run_order(program, seed) for seed in range(count)]

    return run


@pytest.fixture
def small() -> Iterator[Scenario]:
    """The smallest run under the combined schedule: one layer, one microbatch, two ranks."""
    with warnings.catch_warnings():
        quiet()
        yield SMALL
