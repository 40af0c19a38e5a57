"""Measurements that a known cost file would give, for the fit to find again."""

from __future__ import annotations

from typing import Any

import pytest

from real.config import Scenario, load_scenario
from sim.commands.common import FIXTURES
from sim.timing.costs.costfile import Cluster, load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.fit.hostfit import OUTSIDE, count_calls
from sim.timing.fit.small import traces_of
from sim.timing.replay.fold import replay_folded
from sim.timing.replay.lower import step_records

UNIT_COSTS = {
    "unshard gathered": 200.0,
    "unshard noop": 2.0,
    "reshard": 90.0,
    "reduce": 700.0,
    "reduce last": 900.0,
}
NODE_COST, OUTSIDE_COST, HOOK, KERNEL_BACKWARD = 50.0, 400.0, 12.0, 3.0
CALLS = {
    "kernel_new": 6.0,
    "event_record": 1.5,
    "event_wait": 1.0,
    "stream_wait": 3.0,
    "record_stream": 2.0,
    "nvtx_push_pop": 1.0,
    "event_synchronize": 9.5,
}
COLLECTIVE = 30.0
_COSTS = {
    "kernel": CALLS["kernel_new"],
    "kernel_backward": KERNEL_BACKWARD,
    "hook": HOOK,
    "collective": COLLECTIVE,
    "nvtx_push": 0.5,
    "nvtx_pop": 0.5,
    "host_sync": 8.0,
    "resize": 3.0,
    "collective_wait": 5.0,
    "fence": 5.0,
    **{
        name: CALLS[name] for name in ("event_record", "event_wait", "stream_wait", "record_stream")
    },
}


@pytest.fixture(scope="session")
def small() -> Scenario:
    return load_scenario(FIXTURES / "configs" / "bench-b.toml").changed(
        num_layers=2,
        hidden_size=256,
        ffn_hidden_size=256,
        moe_ffn_hidden_size=256,
        num_attention_heads=2,
        seq_length=128,
        micro_batch_size=1,
        vocab_size=1024,
        num_microbatches=2,
    )


@pytest.fixture(scope="session")
def published() -> Cluster:
    return load_cluster("h200")


def _truth(published: Cluster) -> Cluster:
    """The cluster whose host costs the fit has to find."""
    costs = {key: _COSTS[key] for key in _COSTS if not key.startswith("nvtx_")}
    costs |= {"nvtx": 0.5, "node": NODE_COST}
    costs |= {name.removesuffix(" gathered").replace(" ", "_"): c for name, c in UNIT_COSTS.items()}
    first = 1e3 * (NODE_COST + OUTSIDE_COST)
    return published.changed(
        host={**published.host, **{name: 1e3 * cost for name, cost in costs.items()}},
        host_node={"pre_process forward": first, "model backward": first},
        compute_slowdown=1.1,
        communication_slowdown=1.2,
    )


def _times(scenario: Scenario, variant: str, truth: CostModel) -> dict[str, Any]:
    calls = count_calls(step_records(traces_of(scenario, variant, marks_units=True)[0]))
    parts = {}
    for key, inside in calls.items():
        known = sum(n * _COSTS.get(op, 0.0) for op, n in inside.records.items()) / inside.count
        own = UNIT_COSTS.get(key, NODE_COST)
        if key == OUTSIDE:
            own = OUTSIDE_COST * scenario.num_microbatches
        parts[key] = {"count": inside.count, "own_us": own + known, "whole_us": 0.0}
    total = replay_folded(traces_of(scenario, variant), truth).replay.step_ns / 1e3
    return {"step_us": total, "step_with_parts_us": total, "parts": parts}


@pytest.fixture(scope="session")
def measurements(small: Scenario, published: Cluster) -> dict[str, Any]:
    """What `real calibrate` would write on a machine whose costs are known."""
    model = CostModel(published)
    kernels = [
        {"name": name, "shapes": shapes, "us": model.kernel_ns(name, shapes) / 1e3}
        for rows in (1024, 4096)
        for name, shapes in (
            ("te:gemm_TN", [["bf16", 1024, 1024], ["bf16", rows, 1024], ["bf16", rows, 1024]]),
            ("te:expert_gemm_TN", [["bf16", 512, 512], ["bf16", rows, 512], ["bf16", rows, 512]]),
            ("bmm", [["bf16", 8, rows, rows], ["bf16", 8, rows, 128], ["bf16", 8, rows, 128]]),
            ("add", [["bf16", rows, 4096]] * 3),
            ("sum", [["bf16", rows, 4096], ["bf16", rows, 1]]),
            ("cat", [["bf16", rows, 2048], ["bf16", rows, 2048], ["bf16", rows, 4096]]),
        )
    ]
    placement = model.placement((0, 1))
    collectives = [
        {"kind": kind, "bytes": size, "us": model.collective_ns(kind, size, placement) / 1e3}
        for size in (4096, 2**20, 2**24, 2**28)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all_single")
    ]
    truth = CostModel(_truth(published))
    variants = ("no_fsdp_plain", "no_fsdp_combined", "mfsdp_combined")
    return {
        "format": 1,
        "machine": {
            "device": "a GPU",
            "num_devices": 2,
            "packages": {"torch": "2", "transformer-engine-torch": "2"},
            "date": "2026-01-01",
        },
        "small": small.as_dict(),
        "kernels": kernels,
        "collectives": collectives,
        "contention": [
            {
                "kernel": "mm",
                "collective": "all_gather",
                "kernel_us": 100.0,
                "kernel_beside_us": 110.0,
                "collective_us": 200.0,
                "collective_beside_us": 240.0,
            }
        ],
        "calls": CALLS,
        "collective_calls": {"all_gather": COLLECTIVE},
        "nodes": {
            f"{layers} layers": {
                name: _times(small.changed(num_layers=layers), name, truth) for name in variants
            }
            for layers in (1, 2)
        },
    }
