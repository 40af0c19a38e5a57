"""`RMSNorm` and `LayerNorm` against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from sim.te.norm import LayerNorm, RMSNorm


def leaf() -> torch.Tensor:
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_equals_plain_torch(
    kind: type[RMSNorm] | type[LayerNorm], zero_centered_gamma: bool
) -> None:
    module = kind(4, eps=1e-3, zero_centered_gamma=zero_centered_gamma)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.arange(4) * 0.5)
    inp = leaf()
    gamma = module.weight + 1 if zero_centered_gamma else module.weight
    if kind is LayerNorm:
        expected = F.layer_norm(inp, (4,), gamma, module.bias, eps=1e-3)
    else:
        expected = F.rms_norm(inp, (4,), gamma, eps=1e-3)
    out = module(inp)
    torch.testing.assert_close(out, expected)
    tensors = (inp, *module.parameters())
    factor = torch.arange(out.numel()).view(out.shape)
    torch.testing.assert_close(
        torch.autograd.grad((out * factor).sum(), tensors),
        torch.autograd.grad((expected * factor).sum(), tensors),
        rtol=1e-4,
        atol=1e-4,
    )


def test_norm_starts_as_the_identity_scale() -> None:
    assert RMSNorm(2).weight.tolist() == [1, 1]
    assert RMSNorm(2, zero_centered_gamma=True).weight.tolist() == [0, 0]
    assert LayerNorm(2).bias.tolist() == [0, 0]


def test_norm_backward_reads_the_weight_the_module_holds_then() -> None:
    """TE does not save it, so the unit must still be unsharded in this backward."""
    module, inp = RMSNorm(4), leaf()
    out = module(inp)
    module.weight.data = torch.zeros(4)
    out.sum().backward()
    assert torch.equal(inp.grad, torch.zeros_like(inp))


def test_norm_backward_notices_a_released_weight() -> None:
    module = RMSNorm(4)
    out = module(leaf())
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"Cannot read the norm weight in backward"):
        out.sum().backward()


def test_norm_marks_its_parameters_for_sequence_parallelism() -> None:
    module = LayerNorm(4, sequence_parallel=False)
    assert module.weight.sequence_parallel is False
    assert module.bias.sequence_parallel is False


def test_norm_on_meta_gets_its_values_from_reset_parameters() -> None:
    module = RMSNorm(2, device="meta")
    assert module.weight.is_meta
    module.reset_parameters()
    assert module.weight.tolist() == [1, 1]


def test_norm_refuses_a_mismatched_input() -> None:
    with pytest.raises(ValueError, match=r"Expected trailing dimensions \(4,\), got \(2, 3\)\."):
        RMSNorm(4)(torch.zeros(2, 3))
