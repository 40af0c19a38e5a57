"""How many full-size units are alive at once, and how often each is gathered."""

from __future__ import annotations

from collections import Counter

import pytest

from real.config import Scenario
from real.trace import MemorySink
from real.trace.recorder import Record
from sim.session.run import run_in_process

BOUND = {"none": 3, "forward": 4, "both": 5}


def recorded_run(**keys: object) -> list[Record]:
    """Runs one step and returns the records of rank 0."""
    scenario = Scenario(transformer_impl="transformer_engine", train_iters=1).changed(**keys)
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    result = run_in_process(scenario, sinks=sinks)
    assert result.problems() == []
    return sinks[0].records


def most_alive(records: list[Record]) -> set[str]:
    """Returns the largest set of units that are unsharded at the same time."""
    alive: set[str] = set()
    most: set[str] = set()
    for record in records:
        if record["op"] == "unshard" and record["gathered"]:
            alive.add(record["unit"])
        elif record["op"] == "reshard":
            alive.discard(record["unit"])
        if len(alive) > len(most):
            most = set(alive)
    assert not alive, f"still unsharded at the end: {sorted(alive)}"
    return most


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [3, 4])
@pytest.mark.parametrize("prefetch", ["none", "forward", "both"])
def test_full_units_alive_stay_within_the_stated_bound(prefetch: str, num_layers: int) -> None:
    """The bound is what a user plans memory with, so it is exact and not only an upper limit."""
    records = recorded_run(prefetch=prefetch, num_layers=num_layers)
    assert len(most_alive(records)) == BOUND[prefetch]


ONE_MORE = {
    "dense layer": {"moe_layer_freq": "0,1,1,1"},
    "recomputed layernorm": {
        "recompute_granularity": "selective",
        "recompute_modules": "layernorm",
    },
    "frozen layer": {"freeze": "decoder.layers.1.*"},
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", ONE_MORE)
def test_each_stated_reason_costs_exactly_one_more_unit(reason: str) -> None:
    """A bound that nothing reaches would hide a leak of the same size."""
    assert len(most_alive(recorded_run(**ONE_MORE[reason]))) == BOUND["none"] + 1


@pytest.mark.slow
def test_recomputed_attention_costs_no_unit() -> None:
    """It is recomputed inside the node that reads the layer's weights anyway."""
    keys = {"recompute_granularity": "selective", "recompute_modules": "core_attn"}
    assert len(most_alive(recorded_run(**keys))) == BOUND["none"]


@pytest.mark.slow
def test_every_unit_is_gathered_once_per_microbatch_and_direction() -> None:
    """A second gather in one interval would be the cost of a release that came too early."""
    records = recorded_run(num_layers=4, num_microbatches=3, delay_wgrad_compute=True)
    gathers = Counter(r["unit"] for r in records if r["op"] == "unshard" and r["gathered"])
    layers = [f"decoder.layers.{i}{part}" for i in range(4) for part in ("", ".mlp.experts")]
    # The root is kept from a microbatch's first node to its last, forward and backward.
    assert gathers == {"": 3, **dict.fromkeys(layers, 6)}
