"""Delayed weight gradients: when they appear, what they overwrite, and in which order."""

from collections.abc import Callable

import pytest
import torch

from sim.te.base import TransformerEngineBaseModule
from sim.te.grouped_linear import GroupedLinear
from sim.te.layernorm_linear import LayerNormLinear
from sim.te.linear import Linear
from sim.te.wgrad_store import WeightGradStore

Build = Callable[[bool], TransformerEngineBaseModule]

BUILDERS: dict[str, Build] = {
    "Linear": lambda delay: Linear(4, 5, delay_wgrad_compute=delay, device="cpu"),
    "LayerNormLinear": lambda delay: LayerNormLinear(4, 5, delay_wgrad_compute=delay, device="cpu"),
    "GroupedLinear": lambda delay: GroupedLinear(2, 4, 5, delay_wgrad_compute=delay, device="cpu"),
}
every_kind = pytest.mark.parametrize("kind", list(BUILDERS))


def run(module: TransformerEngineBaseModule, seed: int) -> torch.Tensor:
    """Forward and backward of one microbatch; return the input gradient."""
    inp = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = module(inp, [4, 2]) if isinstance(module, GroupedLinear) else module(inp)
    out.backward(torch.arange(out.numel()).view(out.shape).to(out.dtype))
    assert inp.grad is not None
    return inp.grad


def pair(kind: str) -> tuple[TransformerEngineBaseModule, TransformerEngineBaseModule]:
    """Return a delaying and an ordinary module with the same parameters."""
    delayed, ordinary = BUILDERS[kind](True), BUILDERS[kind](False)
    ordinary.load_state_dict(delayed.state_dict())
    return delayed, ordinary


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@every_kind
def test_delayed_wgrad_equals_the_ordinary_one(kind: str) -> None:
    delayed, ordinary = pair(kind)
    assert torch.equal(run(delayed, seed=0), run(ordinary, seed=0))
    delayed.backward_dw()
    torch.testing.assert_close(gradients(delayed), gradients(ordinary), rtol=0, atol=0)


@every_kind
def test_delayed_wgrad_carries_no_graph(kind: str) -> None:
    """`backward_dw` runs with gradients enabled, outside of autograd."""
    delayed, _ = pair(kind)
    run(delayed, seed=0)
    delayed.backward_dw()
    assert not any(gradient.requires_grad for gradient in gradients(delayed).values())


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_backward_leaves_no_weight_gradient(kind: str) -> None:
    delayed, _ = pair(kind)
    run(delayed, seed=0)
    given = {name for name, gradient in gradients(delayed).items() if gradient is not None}
    assert given == {name for name in gradients(delayed) if name.startswith("layer_norm")}


def test_grouped_backward_leaves_a_placeholder_that_is_not_a_gradient() -> None:
    """TE hands autograd the buffers it has yet to fill."""
    delayed, _ = pair("GroupedLinear")
    run(delayed, seed=0)
    given = {name for name, gradient in gradients(delayed).items() if gradient is not None}
    assert given == {"weight0", "weight1"}
    assert bool(delayed.weight0.grad.isnan().all())


@every_kind
def test_post_accumulate_hooks_run_before_the_gradient_exists(kind: str) -> None:
    """So a hook on AccumulateGrad must skip the marked parameters: it fires too early."""
    delayed, _ = pair(kind)
    fired = set()
    for name, parameter in delayed.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.add(name))
    run(delayed, seed=0)
    assert fired == set(gradients(delayed))


def test_norm_gradients_come_with_the_ordinary_backward() -> None:
    delayed, ordinary = pair("LayerNormLinear")
    run(delayed, seed=0)
    run(ordinary, seed=0)
    for name in ("layer_norm_weight", "layer_norm_bias"):
        assert torch.equal(getattr(delayed, name).grad, getattr(ordinary, name).grad)


@every_kind
def test_two_microbatches_in_flight_come_out_in_order(kind: str) -> None:
    """Combined 1F1B puts a second backward before the first `backward_dw`."""
    delayed, _ = pair(kind)
    run(delayed, seed=1)
    run(delayed, seed=2)
    for seed in (1, 2):
        _, ordinary = BUILDERS[kind](True), BUILDERS[kind](False)
        ordinary.load_state_dict(delayed.state_dict())
        run(ordinary, seed=seed)
        delayed.backward_dw()
        for name in delayed.weight_names:
            assert torch.equal(getattr(delayed, name).grad, getattr(ordinary, name).grad)


@every_kind
def test_backward_dw_assigns_and_does_not_add(kind: str) -> None:
    """Without a hook that takes each gradient away, only the last microbatch survives."""
    delayed, ordinary = pair(kind)
    run(delayed, seed=1)
    delayed.backward_dw()
    run(delayed, seed=2)
    delayed.backward_dw()
    run(ordinary, seed=2)
    for name in delayed.weight_names:
        assert torch.equal(getattr(delayed, name).grad, getattr(ordinary, name).grad)


@every_kind
def test_backward_dw_keeps_an_existing_bias_gradient(kind: str) -> None:
    """TE sets the bias gradient only where there is none."""
    delayed, _ = pair(kind)
    name = "bias0" if kind == "GroupedLinear" else "bias"
    run(delayed, seed=1)
    delayed.backward_dw()
    first = getattr(delayed, name).grad.clone()
    run(delayed, seed=2)
    delayed.backward_dw()
    assert torch.equal(getattr(delayed, name).grad, first)


@every_kind
def test_hooks_run_in_order_after_the_gradients_are_set(kind: str) -> None:
    delayed, _ = pair(kind)
    seen: list[tuple[str, bool]] = []

    def hook(label: str) -> Callable[[], None]:
        def see() -> None:
            grads = [getattr(delayed, name).grad for name in delayed.weight_names]
            seen.append((label, not any(bool(grad.isnan().any()) for grad in grads)))

        return see

    delayed.register_wgrad_accumulation_and_reduce_hooks(hook("first"))
    delayed.register_wgrad_accumulation_and_reduce_hooks(hook("second"))
    run(delayed, seed=0)
    assert seen == []
    delayed.backward_dw()
    assert seen == [("first", True), ("second", True)]


@every_kind
def test_backward_dw_gives_the_gradient_to_the_parameter_the_module_holds_now(kind: str) -> None:
    """It looks the weight up by attribute, so a reshard in between changes who receives it."""
    delayed, _ = pair(kind)
    run(delayed, seed=0)
    name = delayed.weight_names[0]
    old = getattr(delayed, name)
    new = torch.nn.Parameter(old.detach().clone())
    setattr(delayed, name, new)
    delayed.backward_dw()
    assert new.grad is not None
    assert old.grad is None or bool(old.grad.isnan().all())


@every_kind
def test_backward_dw_needs_no_weight_values(kind: str) -> None:
    """wgrad reads the input and the output gradient; the attribute must exist, not its storage."""
    delayed, _ = pair(kind)
    run(delayed, seed=0)
    getattr(delayed, delayed.weight_names[0]).untyped_storage().resize_(0)
    delayed.backward_dw()


@every_kind
def test_delayed_parameters_are_marked_and_the_norm_is_not(kind: str) -> None:
    delayed, ordinary = pair(kind)

    def marked(module: torch.nn.Module) -> set[str]:
        return {
            name
            for name, parameter in module.named_parameters()
            if getattr(parameter, "skip_backward_post_hook", False)
        }

    assert marked(delayed) == {name for name in gradients(delayed) if "layer_norm" not in name}
    assert marked(ordinary) == set()


@every_kind
def test_backward_dw_is_a_no_op_when_not_delaying(kind: str) -> None:
    _, ordinary = pair(kind)
    ordinary.register_wgrad_accumulation_and_reduce_hooks(lambda: pytest.fail("hook ran"))
    run(ordinary, seed=0)
    ordinary.backward_dw()
    assert not ordinary.need_backward_dw()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_backward_dw_without_a_backward_is_an_error(kind: str) -> None:
    with pytest.raises(RuntimeError, match="Pop empty queue"):
        BUILDERS[kind](True).backward_dw()


def test_grouped_backward_dw_without_a_backward_runs_no_hook() -> None:
    """Only the grouped module returns silently, as in TE."""
    module = BUILDERS["GroupedLinear"](True)
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: pytest.fail("hook ran"))
    module.backward_dw()


def test_disabled_store_refuses_to_put() -> None:
    with pytest.raises(RuntimeError, match="delay_wgrad_compute is not enabled"):
        WeightGradStore().put([], lambda: ())


def test_store_with_entries_is_not_empty() -> None:
    store = WeightGradStore(delay_wgrad_compute=True)
    store.assert_empty()
    store.put([1, 2], lambda a, b: (a + b,))
    with pytest.raises(RuntimeError, match="Queue is not empty"):
        store.assert_empty()
    assert store.pop() == ((3,), [1, 2])
