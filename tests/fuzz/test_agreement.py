"""Two opinions of one run: what vector clocks find and what orders of the devices show."""

from __future__ import annotations

import dataclasses

import pytest

from real.config import Scenario
from real.trace import MemorySink, OpKind, Trace
from sim.checks.storage import check_storage
from sim.fuzz.order import run_order
from sim.fuzz.program import build_program
from sim.fuzz.seeds import Setting, run_once
from sim.megatron import megatron_on_fake_cuda

WAITS = {OpKind.EVENT_WAIT, OpKind.STREAM_WAIT, OpKind.HOST_SYNC, OpKind.COLLECTIVE_WAIT}
MOST_ORDERS = 150


def traces_of(scenario: Scenario) -> list[Trace]:
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with megatron_on_fake_cuda():
        run_once(Setting(scenario=scenario), sinks=sinks, schedule_seed=0, records_kernels=True)
    return [
        Trace(
            rank=rank,
            world_size=scenario.world_size,
            scenario=scenario.as_dict(),
            records=sink.records[1:],
            is_complete=True,
        )
        for rank, sink in enumerate(sinks)
    ]


def first_that_shows(traces: list[Trace], most: int) -> int | None:
    program = build_program(traces)
    return next((s for s in range(most) if not run_order(program, s).is_good), None)


@pytest.mark.slow
def test_both_find_the_same_waits_missing(small: Scenario) -> None:
    """Each wait of a rank is left out in turn; without one that matters, some order goes wrong."""
    traces = traces_of(small)
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
