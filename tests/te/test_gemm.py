"""`general_gemm` and `general_grouped_gemm` against `torch.matmul`."""

import pytest
import torch

from sim.te.gemm import general_gemm, general_grouped_gemm

WEIGHT_O5_I4 = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
INPUT_T3_I4 = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
GRAD_T3_O5 = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))


def test_gemm_tn_is_the_forward() -> None:
    out = general_gemm(WEIGHT_O5_I4, INPUT_T3_I4, layout="TN")[0]
    torch.testing.assert_close(out, INPUT_T3_I4 @ WEIGHT_O5_I4.T)


def test_gemm_nn_is_the_input_gradient() -> None:
    out = general_gemm(WEIGHT_O5_I4, GRAD_T3_O5, layout="NN", grad=True)[0]
    torch.testing.assert_close(out, GRAD_T3_O5 @ WEIGHT_O5_I4)


def test_gemm_nt_is_the_weight_gradient() -> None:
    out = general_gemm(INPUT_T3_I4, GRAD_T3_O5, layout="NT", grad=True)[0]
    torch.testing.assert_close(out, GRAD_T3_O5.T @ INPUT_T3_I4)


def test_gemm_bias_is_added_forward_and_summed_backward() -> None:
    bias = torch.arange(5.0)
    out, gradient, *_ = general_gemm(WEIGHT_O5_I4, INPUT_T3_I4, bias=bias)
    torch.testing.assert_close(out, INPUT_T3_I4 @ WEIGHT_O5_I4.T + bias)
    assert gradient is None
    _, gradient, *_ = general_gemm(INPUT_T3_I4, GRAD_T3_O5, bias=bias, layout="NT", grad=True)
    torch.testing.assert_close(gradient, GRAD_T3_O5.sum(dim=0))


def test_gemm_of_bf16_keeps_fp32_precision_in_an_fp32_output() -> None:
    """The router multiplies bf16 matrices into fp32 logits; rounding in between would show."""
    weight, inp = WEIGHT_O5_I4.bfloat16(), INPUT_T3_I4.bfloat16()
    out = general_gemm(weight, inp, torch.float32, layout="TN")[0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, inp.float() @ weight.float().T)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gemm_writes_or_adds_to_a_given_output(accumulate: bool) -> None:
    out = torch.ones(3, 5)
    product = INPUT_T3_I4 @ WEIGHT_O5_I4.T
    returned = general_gemm(WEIGHT_O5_I4, INPUT_T3_I4, out=out, accumulate=accumulate)[0]
    assert returned is out
    torch.testing.assert_close(out, product + 1 if accumulate else product)


def test_gemm_is_not_recorded_by_autograd() -> None:
    weight = WEIGHT_O5_I4.clone().requires_grad_()
    assert not general_gemm(weight, INPUT_T3_I4)[0].requires_grad


def test_gemm_refuses_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="Expected a GEMM layout in"):
        general_gemm(WEIGHT_O5_I4, INPUT_T3_I4, layout="TT")


def test_grouped_gemm_cuts_a_single_output_by_rows() -> None:
    weights = [WEIGHT_O5_I4, WEIGHT_O5_I4 * 2]
    out = torch.empty(3, 5)
    general_grouped_gemm(
        weights, torch.split(INPUT_T3_I4, [1, 2]), [out], [None] * 2, torch.float32,
        m_splits=[1, 2], single_output=True,
    )  # fmt: skip
    expected = INPUT_T3_I4 @ WEIGHT_O5_I4.T
    expected[1:] *= 2
    torch.testing.assert_close(out, expected)


def test_grouped_gemm_without_rows_writes_a_zero_weight_gradient() -> None:
    """An expert that got no token still needs a gradient of zeros, not of old memory."""
    out = [torch.full((5, 4), torch.nan)]
    general_grouped_gemm(
        [INPUT_T3_I4[:0]], [GRAD_T3_O5[:0]], out, [None], torch.float32, layout="NT", grad=True
    )
    assert torch.equal(out[0], torch.zeros(5, 4))
