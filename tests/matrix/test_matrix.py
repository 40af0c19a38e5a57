"""Every combination that is supported, trained on fake ranks and compared with its reference."""

from __future__ import annotations

import itertools
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real.config import Scenario, flag, load_scenario
from sim.quiet import quiet
from sim.session.options import RunOptions
from sim.session.run import run_in_process

pytestmark = pytest.mark.slow

BASE = load_scenario(Path(__file__).parents[2] / "fixtures" / "configs" / "default.toml")

LOCAL = {"transformer_impl": "local"}
TE = {"transformer_impl": "transformer_engine"}
DELAYED = {**TE, "delay_wgrad_compute": True}
PLAIN = {"overlap_moe_expert_parallel_comm": False}
PLAIN_HOOKS = {**PLAIN, "fine_grained_hooks": True}

SPECS = {"local": LOCAL, "te": TE, "te-delayed": DELAYED}
MESHES = {
    "ep2-dp2": {"world_size": 4, "expert_model_parallel_size": 2},
    "ep4": {"world_size": 4, "expert_model_parallel_size": 4},
    "ep2-hybrid2x2": {
        "world_size": 8,
        "expert_model_parallel_size": 2,
        "num_distributed_optimizer_instances": 2,
    },
}
SHARDED_OUTER = {**MESHES["ep2-hybrid2x2"], "outer_dp_sharding_strategy": "optim"}
TIED = {"untie_embeddings_and_output_weights": False}
SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 32}
DENSE_FIRST = {"num_layers": 4, "moe_layer_freq": "0,1,1,1"}
HYBRID_MODEL = {"hybrid_layer_pattern": "*E*-", "num_layers": 4}


def recompute(modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


SPECIALS: dict[str, dict[str, Any]] = {
    # ranks
    "2-ranks-ep2": {"world_size": 2},
    "8-ranks-ep2": {"world_size": 8},
    "16-ranks-ep2": {"world_size": 16, "num_layers": 2, "num_microbatches": 2},
    "sharded-outer-axis": SHARDED_OUTER,
    "sharded-outer-axis-delayed": {**SHARDED_OUTER, **DELAYED, "num_layers": 4},
    # weights with more than one consumer
    "tied": TIED,
    "tied-delayed": {**TIED, **DELAYED},
    "mtp": {"mtp_num_layers": 1},
    "mtp-delayed": {"mtp_num_layers": 1, **DELAYED},
    "mtp-tied": {"mtp_num_layers": 1, **TIED},
    # layers of another shape
    "shared-expert": {**SHARED_EXPERT, **TE},
    "shared-expert-delayed": {**SHARED_EXPERT, **DELAYED},
    "dense-first-layer": DENSE_FIRST,
    "dense-first-layer-delayed": {**DENSE_FIRST, **DELAYED},
    # parameters without a gradient
    "frozen-router": {"freeze": "*.router.weight"},
    "frozen-router-delayed": {"freeze": "*.router.weight", **DELAYED},
    "frozen-layer": {"freeze": "*.layers.1.*"},
    "frozen-layer-te": {"freeze": "*.layers.1.*", **TE},
    "frozen-last-layer": {"freeze": "*.layers.2.*"},
    "frozen-embedding-plain": {"freeze": "embedding.*", **PLAIN_HOOKS},
    # recompute
    **{
        f"recompute-{modules.replace(',', '-')}{suffix}": {**recompute(modules), **spec}
        for modules, (suffix, spec) in itertools.product(
            ["core_attn", "layernorm", "core_attn,layernorm"], [("", TE), ("-delayed", DELAYED)]
        )
    },
    # prefetch
    **{
        f"prefetch-{policy}-{num_layers}-layers": {
            **DELAYED,
            "prefetch": policy,
            "num_layers": num_layers,
        }
        for policy, num_layers in itertools.product(["none", "forward", "both"], [3, 4])
    },
    # training
    "clipped": {"clip_grad": 0.1},
    "clipped-hybrid": {"clip_grad": 0.1, **MESHES["ep2-hybrid2x2"]},
    "sgd": {"optimizer": "sgd"},
    # the plain schedule
    "plain-our-hooks": PLAIN_HOOKS,
    "plain-own-hooks": PLAIN,
    "plain-our-hooks-tied": {**PLAIN_HOOKS, **TIED},
    "plain-full-recompute-our-hooks": {**PLAIN_HOOKS, "recompute_granularity": "full"},
    "hybrid-model-our-hooks": {**HYBRID_MODEL, **TE, **PLAIN_HOOKS},
    "hybrid-model-own-hooks": {**HYBRID_MODEL, **TE, **PLAIN},
}


def grid() -> Iterator[Any]:
    """Yields every combination of spec, mesh, microbatches and layers: one step each."""
    for (spec, options), (mesh, sizes), num_microbatches, num_layers in itertools.product(
        SPECS.items(), MESHES.items(), [1, 2, 3, 5], [3, 4]
    ):
        keys = {
            "num_microbatches": num_microbatches,
            "num_layers": num_layers,
            "train_iters": 1,
            **options,
            **sizes,
        }
        yield pytest.param(keys, id=f"{spec}-{mesh}-{num_microbatches}mb-{num_layers}layers")


def specials() -> Iterator[Any]:
    """Yields the combinations that are not a grid: two steps each, so that the second is seen."""
    for name, options in SPECIALS.items():
        keys = {"num_microbatches": 3, "num_layers": 3, "train_iters": 2, **options}
        yield pytest.param(keys, id=name)


def replay_of(keys: dict[str, Any]) -> str:
    """Returns the command that runs the same scenario."""
    words = []
    for name, value in keys.items():
        if isinstance(value, bool):
            words.append(f"--{flag(name)}" if value else f"--no-{flag(name)}")
        else:
            words += [f"--{flag(name)}", str(value)]
    return f"python -m sim run {shlex.join(words)}"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Megatron warns of options that it sets itself; the command line hides that too."""
    with warnings.catch_warnings():
        quiet()
        yield


def check(keys: dict[str, Any]) -> None:
    replay = replay_of(keys)
    scenario: Scenario = BASE.changed(**keys)
    result = run_in_process(scenario, RunOptions(replay=replay))
    assert result.problems() == [], f"Replay: {replay}"
    assert result.losses[0] == result.reference_losses[0], f"Replay: {replay}"
    assert len(result.losses) == scenario.train_iters


@pytest.mark.parametrize("keys", list(grid()))
def test_the_schedule_trains_as_without_fsdp(keys: dict[str, Any]) -> None:
    """Spec, mesh, microbatches and layers meet in the hooks, so all of them are tried."""
    check(keys)


@pytest.mark.parametrize("keys", list(specials()))
def test_a_special_model_trains_as_without_fsdp(keys: dict[str, Any]) -> None:
    """Each one changes who reads a weight, how often its gradient comes, or where it lives."""
    check(keys)
