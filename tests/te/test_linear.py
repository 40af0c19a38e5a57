"""`Linear`, `LayerNormLinear` and `GroupedLinear` against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from sim.te.grouped_linear import GroupedLinear
from sim.te.layernorm_linear import LayerNormLinear
from sim.te.linear import Linear

SHAPE_S3_B2_H4 = (3, 2, 4)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def randomize(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, tensors)


def weigh(out: torch.Tensor) -> torch.Tensor:
    """Return a scalar whose gradient differs at every element."""
    return (out * torch.arange(out.numel()).view(out.shape)).sum()


@pytest.mark.parametrize("parallel_mode", [None, "column", "row"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_plain_torch(parallel_mode: str | None, bias: bool) -> None:
    module = Linear(4, 5, bias=bias, parallel_mode=parallel_mode, device="cpu")
    randomize(module)
    inp = leaf(*SHAPE_S3_B2_H4)
    tensors = (inp, *module.parameters())
    expected = F.linear(inp, module.weight, module.bias if bias else None)
    out = module(inp)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        gradients(weigh(out), *tensors), gradients(weigh(expected), *tensors)
    )


def test_linear_returned_bias_is_not_added() -> None:
    """Megatron adds it later, fused with dropout."""
    module = Linear(4, 5, return_bias=True, device="cpu")
    randomize(module)
    out, bias = module(leaf(*SHAPE_S3_B2_H4))
    torch.testing.assert_close(out, F.linear(leaf(*SHAPE_S3_B2_H4), module.weight))
    assert bias is module.bias


def test_linear_without_gradients_builds_no_graph() -> None:
    module = Linear(4, 5, device="cpu")
    with torch.no_grad():
        assert not module(leaf(*SHAPE_S3_B2_H4)).requires_grad


def test_linear_frozen_weight_still_passes_the_input_gradient() -> None:
    module = Linear(4, 5, bias=False, device="cpu")
    module.weight.requires_grad_(False)
    inp = leaf(*SHAPE_S3_B2_H4)
    module(inp).sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(inp.grad, module.weight.sum(dim=0).expand(SHAPE_S3_B2_H4))


def test_linear_refuses_an_input_of_another_dtype() -> None:
    """As in TE, outside of autocast nothing is cast silently."""
    module = Linear(4, 5, device="cpu")
    with pytest.raises(TypeError, match=r"Found input dtype: torch\.bfloat16 and 'weight'"):
        module(leaf(*SHAPE_S3_B2_H4, dtype=torch.bfloat16))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_layernorm_linear_equals_plain_torch(normalization: str, zero_centered_gamma: bool) -> None:
    module = LayerNormLinear(
        4, 5, normalization=normalization, zero_centered_gamma=zero_centered_gamma, device="cpu"
    )
    randomize(module)
    inp = leaf(*SHAPE_S3_B2_H4)
    gamma = module.layer_norm_weight + 1 if zero_centered_gamma else module.layer_norm_weight
    if normalization == "LayerNorm":
        normed = F.layer_norm(inp, (4,), gamma, module.layer_norm_bias, eps=1e-5)
    else:
        normed = F.rms_norm(inp, (4,), gamma, eps=1e-5)
    expected = F.linear(normed, module.weight, module.bias)
    tensors = (inp, *module.parameters())
    out = module(inp)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        gradients(weigh(out), *tensors),
        gradients(weigh(expected), *tensors),
        rtol=1e-4,
        atol=1e-4,
    )


def test_layernorm_linear_trains_the_norm_when_the_input_needs_no_gradient() -> None:
    """The first layer after a frozen embedding has such an input."""
    module = LayerNormLinear(4, 5, device="cpu")
    module(leaf(*SHAPE_S3_B2_H4).detach()).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_layernorm_linear_bf16_adds_one_to_gamma_in_fp32() -> None:
    """1 + 2**-9 is not a bf16 number; rounding it first would drop gamma."""
    module = LayerNormLinear(
        4, 1, bias=False, normalization="RMSNorm", zero_centered_gamma=True,
        params_dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    with torch.no_grad():
        module.layer_norm_weight.fill_(2.0**-9)
        module.weight.fill_(0.25)
    inp = torch.full((1, 4), 1.5, dtype=torch.bfloat16)
    normed = (1 + 2.0**-9) * torch.ones(4)
    torch.testing.assert_close(module(inp).float().item(), normed.bfloat16().mean().item())


@pytest.mark.parametrize("splits", [[2, 3, 1], [0, 6, 0], [0, 0, 0]])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_equals_one_linear_for_each_expert(splits: list[int], bias: bool) -> None:
    module = GroupedLinear(3, 4, 5, bias=bias, device="cpu")
    randomize(module)
    inp = leaf(sum(splits), 4)
    experts = []
    for index in range(3):
        expert = Linear(4, 5, bias=bias, device="cpu")
        with torch.no_grad():
            expert.weight.copy_(getattr(module, f"weight{index}"))
            if bias:
                expert.bias.copy_(getattr(module, f"bias{index}"))
        experts.append(expert)
    rows = torch.split(inp, splits)
    expected = torch.cat([expert(row) for expert, row in zip(experts, rows, strict=True)])
    out = module(inp, splits)
    torch.testing.assert_close(out, expected)
    names = ("weight", "bias") if bias else ("weight",)
    ours = [getattr(module, f"{name}{index}") for index in range(3) for name in names]
    theirs = [getattr(expert, name) for expert in experts for name in names]
    torch.testing.assert_close(
        gradients(weigh(out), inp, *ours), gradients(weigh(expected), inp, *theirs)
    )


def test_grouped_linear_takes_splits_as_a_tensor() -> None:
    module = GroupedLinear(2, 4, 5, device="cpu")
    inp = leaf(3, 4)
    assert torch.equal(module(inp, torch.tensor([1, 2])), module(inp, [1, 2]))


def test_grouped_linear_refuses_splits_for_another_number_of_experts() -> None:
    with pytest.raises(ValueError, match=r"Expected 2 splits, got 3\."):
        GroupedLinear(2, 4, 5, device="cpu")(leaf(3, 4), [1, 1, 1])


@pytest.mark.parametrize(
    "read", ["forward", "backward"], ids=["released_before_forward", "released_before_backward"]
)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_released_weight_is_noticed(kind: str, read: str) -> None:
    """The saved weight is the parameter itself, so an early reshard must not go unseen."""
    module, inp, arguments = {
        "Linear": (Linear(4, 5, device="cpu"), leaf(3, 4), ()),
        "LayerNormLinear": (LayerNormLinear(4, 5, device="cpu"), leaf(3, 4), ()),
        "GroupedLinear": (GroupedLinear(2, 4, 5, device="cpu"), leaf(3, 4), ([1, 2],)),
    }[kind]
    weight = module.weight0 if kind == "GroupedLinear" else module.weight
    out = module(inp, *arguments) if read == "backward" else None
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"Cannot read the weight.*storage was released"):
        module(inp, *arguments) if out is None else out.sum().backward()


@pytest.mark.parametrize("delay", [False, True])
def test_bf16_linear_equals_plain_torch_bit_for_bit(delay: bool) -> None:
    """Losses are compared to the last bit between schedules, in bf16."""
    module = Linear(
        4, 5, bias=False, params_dtype=torch.bfloat16, delay_wgrad_compute=delay, device="cpu"
    )
    randomize(module)
    reference = torch.nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
    reference.load_state_dict({"weight": module.weight})
    inputs = [leaf(*SHAPE_S3_B2_H4, dtype=torch.bfloat16).detach() for _ in range(2)]
    for layer, inp in zip((module, reference), inputs, strict=True):
        layer(inp.requires_grad_()).square().sum().backward()
    module.backward_dw()
    assert torch.equal(module.weight.grad, reference.weight.grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
