"""Correct runs raise no alarm, kernels included."""

from __future__ import annotations

import warnings

import pytest

from real.config import Scenario
from sim.quiet import quiet
from sim.session.options import RunOptions
from sim.session.run import run_in_process

SMALL = {"num_layers": 2, "num_microbatches": 3, "train_iters": 2}
TE = {**SMALL, "transformer_impl": "transformer_engine"}

SCENARIOS: dict[str, dict[str, object]] = {
    "local": SMALL,
    "three layers, delayed, prefetch both": {
        **TE,
        "num_layers": 3,
        "num_microbatches": 5,
        "delay_wgrad_compute": True,
        "prefetch": "both",
    },
    "MTP, tied, shared expert": {
        **TE,
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": False,
        "moe_shared_expert_intermediate_size": 32,
    },
    "recompute": {
        **TE,
        "recompute_granularity": "selective",
        "recompute_modules": "core_attn,layernorm",
    },
    "frozen layer, prefetch forward": {
        **SMALL,
        "num_layers": 3,
        "freeze": "decoder.layers.1.*",
        "prefetch": "forward",
    },
    "hybrid": {**TE, "world_size": 8, "num_distributed_optimizer_instances": 2},
    "hybrid, outer axis sharded": {
        **TE,
        "world_size": 8,
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
    },
    "plain, our hooks": {
        **TE,
        "overlap_moe_expert_parallel_comm": False,
        "fine_grained_hooks": True,
    },
    "plain, MFSDP's own hooks": {**TE, "overlap_moe_expert_parallel_comm": False},
    "HybridModel": {
        **TE,
        "num_layers": 4,
        "hybrid_layer_pattern": "*E*-",
        "overlap_moe_expert_parallel_comm": False,
        "fine_grained_hooks": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_correct_run_has_no_violation(name: str) -> None:
    """An alarm on correct code teaches people to ignore alarms."""
    with warnings.catch_warnings():
        quiet()
        result = run_in_process(Scenario(**SCENARIOS[name]), options=RunOptions(kernel_steps=None))
    assert result.violations == ()
    assert result.problems() == []
