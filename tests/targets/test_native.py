"""Trees that join MFSDP v2 and the combined schedule themselves; a test says which it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.targets.conftest import Run

pytestmark = pytest.mark.slow

_DELAYED = ("--transformer-impl", "transformer_engine", "--delay-wgrad-compute")
Find = Callable[[str], Path]


@pytest.mark.parametrize("name", ["6484", "6694"])
def test_the_optimizer_does_not_wait_for_the_last_reduction(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    run = run_target(
        "--target", "native", "--megatron", tree(name), "--reference", "plain", *_DELAYED
    )
    assert run.result["losses"] == run.result["reference_losses"]
    assert any("The main gradient of unit <root>" in text for text in run.broken("I8"))


def test_gathers_race_the_cast_of_the_weights(run_target: Callable[..., Run], tree: Find) -> None:
    words = ("--target", "native", "--megatron", tree("6484"), "--reference", "plain")
    run = run_target(*words, *_DELAYED, "--train-iters", "3")  # the race is with the second step's
    assert any("The model weight of unit decoder.layers.0 " in text for text in run.broken("I9"))


def test_experts_stay_gathered_without_delayed_gradients(
    run_target: Callable[..., Run], tree: Find
) -> None:
    run = run_target("--target", "native", "--megatron", tree("6694"), "--reference", "plain")
    assert run.result["losses"][1] != run.result["reference_losses"][1]
    wanted = "Unit decoder.layers.0.mlp.experts is unsharded at the end of a step."
    assert any(wanted in text for text in run.broken("I3"))


def test_a_hook_on_nothing_reopens_a_reduced_layer(
    run_target: Callable[..., Run], tree: Find
) -> None:
    run = run_target(
        "--target", "native", "--megatron", tree("6694"), "--transformer-impl", "transformer_engine"
    )
    assert run.status == 1
    assert "Missing gradient for FSDP parameter ('self_attention.linear_proj.weight',)" in run.err


def test_an_early_release_takes_a_layer_in_backward(
    run_target: Callable[..., Run], tree: Find
) -> None:
    target = "native:ep_overlap_early_attn_memory_release"
    run = run_target("--target", target, "--megatron", tree("6694"), *_DELAYED, "--num-layers", "3")
    assert run.status == 1
    assert "Missing gradient for FSDP parameter ('self_attention.linear_proj.weight',)" in run.err


def test_a_tree_without_the_join_is_clean_under_its_plain_schedule(
    run_target: Callable[..., Run], tree: Find
) -> None:
    run = run_target(
        "--target", "native", "--megatron", tree("main"), "--no-overlap-moe-expert-parallel-comm"
    )
    assert run.result["problems"] == []
