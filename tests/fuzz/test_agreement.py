"""Two opinions of one run: what vector clocks find and what orders of the devices show."""

from __future__ import annotations

import dataclasses

import pytest

from real.config import Scenario
from real.trace import OpKind, Trace
from sim.checks.storage import check_storage
from sim.orders.order import run_order
from sim.orders.program import build_program
from sim.session.options import RunOptions
from sim.session.run import record_traces

WAITS = {OpKind.EVENT_WAIT, OpKind.STREAM_WAIT, OpKind.HOST_SYNC, OpKind.COLLECTIVE_WAIT}
MOST_ORDERS = 150


def first_that_shows(traces: list[Trace], most: int) -> int | None:
    program = build_program(traces)
    return next((s for s in range(most) if not run_order(program, s).is_good), None)


@pytest.mark.slow
def test_both_find_the_same_waits_missing(small: Scenario) -> None:
    """Each wait of a rank is left out in turn; without one that matters, some order goes wrong."""
    traces = record_traces(small, RunOptions(kernel_steps=None))
    mine = traces[1]
    places = [i for i, record in enumerate(mine.records) if record["op"] in WAITS]
    num_needed = 0
    for place in places:
        records = [record for i, record in enumerate(mine.records) if i != place]
        broken = dataclasses.replace(mine, records=records)
        is_needed = bool(check_storage([broken]))
        # Silence is worth a few orders; where something is to be shown, wait for it.
        shown = first_that_shows([traces[0], broken], MOST_ORDERS if is_needed else 8)
        assert (shown is not None) == is_needed, mine.records[place]
        num_needed += is_needed
    assert 10 < num_needed < len(places)
