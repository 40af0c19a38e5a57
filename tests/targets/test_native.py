"""Trees that join MFSDP v2 and the combined schedule themselves; a test says which it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from real.trace import OpKind, Trace
from sim.checks import check_traces
from tests.targets.conftest import Run

pytestmark = pytest.mark.slow

_DELAYED = ("--transformer-impl", "transformer_engine", "--delay-wgrad-compute")
Find = Callable[[str], Path]


_NATIVE = ("--target", "native", "--prefetch", "both", "--reference", "plain")
_TE = ("--transformer-impl", "transformer_engine")
_PLAIN = "--no-overlap-moe-expert-parallel-comm"
_REPAIRS = {"6484": "A,B,C,D", "6694": "A,C,D,F"}
_VARIANTS = [(), _TE, _DELAYED]  # delayed gradients are Transformer Engine's
both = pytest.mark.parametrize("name", ["6484", "6694"])


def _most_unsharded(trace: Trace) -> int:
    """Returns how many units a rank had unsharded at once."""
    unsharded: set[str] = set()
    most = 0
    for record in trace.records:
        if record["op"] == OpKind.UNSHARD:
            unsharded.add(record["unit"])
        elif record["op"] == OpKind.RESHARD:
            unsharded.discard(record["unit"])
        most = max(most, len(unsharded))
    return most


# -- faults ---------------------------------------------------------------------------------------


@both
def test_the_optimizer_does_not_wait_for_the_last_reduction(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    run = run_target(*_NATIVE, "--megatron", tree(name), *_DELAYED)
    assert run.result["losses"] == run.result["reference_losses"]
    assert any("The main gradient of unit <root>" in text for text in run.broken("I8"))


def test_gathers_race_the_cast_of_the_weights(run_target: Callable[..., Run], tree: Find) -> None:
    words = (*_NATIVE, "--megatron", tree("6484"), *_DELAYED)
    run = run_target(*words, "--train-iters", "3")  # the race is with the second step's
    assert any("The model weight of unit decoder.layers.0 " in text for text in run.broken("I9"))


def test_casts_of_every_step_are_ordered_in_the_newer_tree(
    run_target: Callable[..., Run], tree: Find
) -> None:
    """It casts on the stream of gathers."""
    run = run_target(*_NATIVE, "--megatron", tree("6694"), *_DELAYED, "--train-iters", "3")
    assert run.broken("I9") == []


@pytest.mark.parametrize(("patches", "is_race"), [("", False), ("no-host-wait", True)])
def test_the_first_gathers_rest_on_a_wait_of_the_host(
    run_target: Callable[..., Run], tree: Find, patches: str, is_race: bool
) -> None:
    """Their weights are cast when the model is built; its optimizer's construction waits."""
    words = (*_NATIVE, "--megatron", tree("6694"), *_DELAYED, "--train-iters", "1")
    run = run_target(*words, "--kernels", "build", patches=patches)
    found = run.broken("I9")
    assert any("The model weight of unit decoder.layers.0 " in text for text in found) is is_race
    assert bool(found) is is_race


@both
def test_experts_stay_gathered_without_delayed_gradients(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    run = run_target(*_NATIVE, "--megatron", tree(name))
    assert run.result["losses"][1] != run.result["reference_losses"][1]
    experts = "Unit decoder.layers.0.mlp.experts is"
    left = f"{experts} unsharded at the end of a step."
    assert any(left in text for text in run.broken("I3"))
    old = f"{experts} used with weights that were gathered before the optimizer's step."
    assert any(old in text for text in run.broken("I9"))
    assert run.broken("I1") == []


@both
def test_a_hook_on_nothing_reopens_a_reduced_layer(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    run = run_target(*_NATIVE, "--megatron", tree(name), *_TE)
    assert run.status == 1
    assert "Missing gradient for FSDP parameter ('self_attention.linear_proj.weight',)" in run.err
    found = {(v.rule, v.unit) for v in check_traces(run.traces)}
    assert ("I6", "decoder.layers.1") in found


@both
def test_experts_are_not_released_after_their_forward(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    words = (*_NATIVE, "--megatron", tree(name), *_DELAYED, "--num-layers", "4")
    run = run_target(*words, patches=_REPAIRS[name])
    units, in_bytes = run.broken("I20")[0], run.broken("I20")[-1]
    assert "Expected at most 5 units unsharded, got <root>, " in units
    assert "bytes of full weights (5 units)" in in_bytes
    assert run.result["problems"] == run.broken("I20")


def test_an_early_release_takes_a_layer_in_backward(
    run_target: Callable[..., Run], tree: Find
) -> None:
    target = "native:ep_overlap_early_attn_memory_release"
    run = run_target("--target", target, "--megatron", tree("6694"), *_DELAYED, "--num-layers", "3")
    assert run.status == 1
    assert "Missing gradient for FSDP parameter ('self_attention.linear_proj.weight',)" in run.err
    found = {(v.rule, v.unit) for v in check_traces(run.traces)}
    assert ("I3", "decoder.layers.1") in found


# -- no false alarm -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("variant", _VARIANTS, ids=" ".join)
def test_a_repaired_tree_is_clean(
    run_target: Callable[..., Run], tree: Find, name: str, variant: tuple[str, ...]
) -> None:
    run = run_target(*_NATIVE, "--megatron", tree(name), *variant, patches=_REPAIRS[name])
    assert run.result["problems"] == []
    assert run.result["losses"] == run.result["reference_losses"]


@both
@pytest.mark.parametrize("variant", [_TE, _DELAYED], ids=" ".join)
def test_a_tree_that_releases_its_experts_keeps_to_the_bound(
    run_target: Callable[..., Run], tree: Find, name: str, variant: tuple[str, ...]
) -> None:
    """Its plain schedule, and one unit of the other direction where gradients are delayed."""
    words = (*_NATIVE, "--megatron", tree(name), *variant, "--num-layers", "4")
    run = run_target(*words, patches=f"{_REPAIRS[name]},E".replace("F,", ""))
    assert run.result["problems"] == []
    assert [_most_unsharded(trace) for trace in run.traces] == [4 + (variant is _DELAYED)] * 2


@pytest.mark.parametrize("name", ["6484", "6694", "main"])
def test_a_tree_is_clean_under_its_plain_schedule(
    run_target: Callable[..., Run], tree: Find, name: str
) -> None:
    words = ("--target", "native", "--megatron", tree(name), "--num-layers", "4")
    run = run_target(*words, _PLAIN)
    assert run.result["problems"] == []
    assert [_most_unsharded(trace) for trace in run.traces] == [4, 4]


# -- mistakes of our own --------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("mistake", "rule", "words"),
    [
        ("no-wait", "I1", "The full weight of unit decoder.layers.1 is used by two streams"),
        ("early-release", "I4", "The full weight of unit decoder.layers.1 is released before"),
        ("reduced-twice", "I5", "Unit decoder.layers.1 is reduced twice in one microbatch."),
    ],
)
def test_a_mistake_in_the_join_is_found(
    run_target: Callable[..., Run], tree: Find, name: str, mistake: str, rule: str, words: str
) -> None:
    run = run_target(
        *_NATIVE,
        *("--megatron", tree(name), "--num-microbatches", "2"),
        patches=f"{_REPAIRS[name]},{mistake}",
    )
    assert any(words in text for text in run.broken(rule))
    assert run.result["problems"] == run.broken(rule)
