"""Runs for shapes: the records of an ordinary run, without its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from real.config import Scenario, load_scenario
from real.trace import MemorySink
from sim.commands.common import FIXTURES
from sim.hollow import is_hollow
from sim.hollow.mode import HollowMode
from sim.hollow.routing import Routing
from sim.session.shapes import ShapesRun, run_for_shapes

SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 64,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "num_microbatches": 2,
    "micro_batch_size": 1,
}


def small(**changes: object) -> Scenario:
    return load_scenario(FIXTURES / "configs" / "bench-b.toml").changed(**{**SMALL, **changes})


def records(
    scenario: Scenario,
    **options: Any,  # noqa: ANN401
) -> list[list[dict[str, Any]]]:
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    run_for_shapes(scenario, ShapesRun(**options), sinks=sinks)
    return [sink.records for sink in sinks]


_SIZES = ("bytes", "was", "shapes")


def without_sizes(record: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what depends on how many tokens go to an expert."""
    return {key: value for key, value in record.items() if key not in _SIZES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "is_reference"),
    [
        ({"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}, False),
        ({"overlap_moe_expert_parallel_comm": True, "transformer_impl": "local"}, False),
        ({"overlap_moe_expert_parallel_comm": False}, False),
        ({"overlap_moe_expert_parallel_comm": True}, True),
    ],
    ids=["delayed wgrad", "local spec", "plain schedule", "no FSDP"],
)
def test_a_hollow_run_has_the_records_of_an_ordinary_one(
    changes: dict[str, object], is_reference: bool
) -> None:
    """Storages, streams, kernels and their order are equal; sizes differ with the routing alone."""
    scenario = small(**changes)
    hollow = records(scenario, is_reference=is_reference, real_floats=0)
    ordinary = records(scenario, is_reference=is_reference, is_hollow=False)
    for mine, theirs in zip(hollow, ordinary, strict=True):
        assert len(mine) == len(theirs) > 1000
        for left, right in zip(mine, theirs, strict=True):
            assert without_sizes(left) == without_sizes(right)


def test_routing_is_even_unless_told_otherwise() -> None:
    """The busiest expert of an uneven routing has the tokens that were asked for."""
    even = Routing().choose(1024, 8, 2)
    assert even.flatten().bincount().tolist() == [256] * 8
    assert (even[:, 0] != even[:, 1]).all()
    uneven = Routing(imbalance=1.5).choose(8192, 8, 2).flatten().bincount().float()
    assert uneven.max() / uneven.mean() == pytest.approx(1.45, abs=0.1)
    assert Routing(imbalance=1.5).choose(64, 8, 2).equal(Routing(imbalance=1.5).choose(64, 8, 2))


def test_values_of_small_whole_numbers_stay() -> None:
    """Routing maps and token counts decide what happens next, so they are computed."""
    with HollowMode(Routing(), real_floats=0):
        scores = torch.randn(16, 4)
        chosen = torch.topk(scores, 2, dim=1).indices
        routing = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()
        counts = routing.sum(dim=0)
        order = routing.T.contiguous().reshape(-1).argsort(descending=True, stable=True)
        rows = scores.index_select(0, order[:32] % 16)
    assert is_hollow(scores)
    assert is_hollow(rows)
    assert not is_hollow(routing)
    assert counts.tolist() == [8, 8, 8, 8]
    assert rows.shape == (32, 4)


def test_big_tensors_cost_no_memory_and_no_time() -> None:
    """A product of a size that no laptop computes in a test."""
    with HollowMode(Routing()):
        left = torch.empty(32768, 32768, requires_grad=True)
        right = torch.zeros(32768, 32768)
        product = (left @ right).relu_()
        product.sum().backward()
    assert product.shape == (32768, 32768)
    assert left.grad is not None
    assert left.grad.shape == left.shape
    assert is_hollow(left.grad)


def test_the_host_reads_nothing_from_a_hollow_number() -> None:
    """A loss without a value is 0 each time, not what the memory held."""
    with HollowMode(Routing(), real_floats=0):
        loss = torch.randn(8).sum()
        assert loss.item() == 0.0
        assert not bool((loss > 1).item())
