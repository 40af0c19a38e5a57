"""Matrix products with Transformer Engine's column-major operand order (`cpp_extensions`).

[Note: operand order] TE names operands as cuBLAS does, column-major. In torch's row-major terms:
`TN` is `B @ A.T` (forward), `NN` is `B @ A` (dgrad), `NT` is `B.T @ A` (wgrad), where A is the
weight (or the input, for wgrad) and B is the input (or the output gradient). No product is recorded
by autograd, also where gradients are enabled, as in `backward_dw`: a kernel launch is not either.

Source: transformer_engine 2.17.1, `pytorch/cpp_extensions/gemm.py`.
"""

from collections.abc import Sequence

import torch

from sim.cuda.shapes import kernel
from sim.te.refusal import refuse_if
from sim.te.storage import require_live

LAYOUTS = ("TN", "NN", "NT")

GemmResult = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@torch.no_grad()
def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    gelu: bool | None = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: object = None,
    ub_type: object = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> GemmResult:
    """Multiplies two matrices; see [Note: operand order].

    The product has the dtype of `out`, else `out_dtype`, else that of `A`. `out` must be contiguous
    and is overwritten, or added to when `accumulate`. `bias` is added to the product when `grad` is
    False; when it is True only its dtype counts: the column sum of `B` is the bias gradient.
    `use_split_accumulator` has no effect: accumulation is never below fp32 here.

    Returns:
        (product, bias gradient or None, None, None), the shape of TE's own result.

    Raises:
        ValueError: unknown layout, or `out` is not contiguous.
        NotImplementedError: quantization, GELU, or userbuffers overlap is asked for.
        RuntimeError: the storage of an operand was released.
    """
    refuse_if(quantization_params is not None, "quantized GEMM output")
    refuse_if(gelu or gelu_in is not None, "GEMM with fused GELU")
    refuse_if(ub is not None or ub_type is not None or bulk_overlap, "userbuffers overlap in GEMM")
    refuse_if(extra_output is not None, "extra GEMM outputs")
    refuse_if(alpha != 1.0 or beta is not None, "GEMM scaling factors")
    if layout not in LAYOUTS:
        raise ValueError(f"Expected a GEMM layout in {LAYOUTS}, got {layout!r}.")
    if out is not None and not out.is_contiguous():
        raise ValueError("Expected a contiguous GEMM output, got a strided one.")
    dtype = out.dtype if out is not None else (out_dtype or A.dtype)
    updates = () if out is None else (out,)
    with kernel(f"te:gemm_{layout}", reads=(A, B, bias), updates=updates) as launch:
        product, bias_gradient = _product(A, B, layout, dtype, out, bias, accumulate, grad)
        launch.writes = (None if out is not None else product, bias_gradient)
    return product, bias_gradient, None, None


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    accumulate: bool,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns product and bias gradient; one kernel with its epilogue."""
    product = _multiply(
        require_live(a, "GEMM operand A"), require_live(b, "GEMM operand B"), layout, dtype
    )
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = _column_sum(b, bias.dtype)
    elif bias is not None:
        product = product + bias.to(dtype)
    if out is None:
        return product, bias_gradient
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)
    return out, bias_gradient


@torch.no_grad()
def general_grouped_gemm(
    A: Sequence[torch.Tensor],
    B: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    quantization_params: Sequence[object],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    use_bias: bool | None = False,
    use_split_accumulator: bool = False,
    D_dtype: object = None,
    single_output: bool = False,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], None]:
    """Multiplies pairwise, one GEMM for each expert, and writes the products to `out`.

    `out` holds one tensor for each pair, or, when `single_output`, one tensor with all products one
    below the other, cut by `m_splits`, the rows of each pair. A pair without rows writes zeros for
    `NT`, so that an expert without tokens gets a zero gradient.

    Returns:
        (`out`, one bias gradient or None for each pair, None).

    Raises:
        NotImplementedError: quantization or GELU is asked for.
    """
    is_quantized = any(quantizer is not None for quantizer in quantization_params)
    refuse_if(is_quantized, "quantized grouped GEMM")
    refuse_if(gelu, "grouped GEMM with fused GELU")
    refuse_if(D_dtype is not None, "grouped GEMM with a separate output dtype")
    if single_output:
        if m_splits is None:
            raise ValueError("Expected m_splits with a single output, got None.")
        targets: Sequence[torch.Tensor] = torch.split(out[0], list(m_splits))
    else:
        targets = out
    biases: Sequence[torch.Tensor | None] = (
        bias if use_bias and bias is not None else [None] * len(A)
    )
    bias_gradients = []
    for a, b, target, pair_bias in zip(A, B, targets, biases, strict=True):
        # A name of its own: on a GPU the products of all experts run side by side.
        with kernel(f"te:expert_gemm_{layout}", reads=(a, b, pair_bias), updates=(target,)) as one:
            bias_gradient = general_gemm(
                a, b, layout=layout, out=target, accumulate=accumulate, bias=pair_bias, grad=grad
            )[1]
            one.writes = (bias_gradient,)
        bias_gradients.append(bias_gradient)
    return out, bias_gradients, None


def _multiply(a: torch.Tensor, b: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
    # cuBLAS accumulates in fp32 and rounds once, to the output dtype; so mixed dtypes are promoted.
    compute_dtype = (
        dtype if a.dtype == b.dtype == dtype else torch.promote_types(torch.float32, dtype)
    )
    a, b = a.to(compute_dtype), b.to(compute_dtype)
    if layout == "TN":
        product = b @ a.t()
    elif layout == "NN":
        product = b @ a
    else:
        product = b.reshape(-1, b.shape[-1]).t() @ a.reshape(-1, a.shape[-1])
    return product.to(dtype)


def _column_sum(b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    compute_dtype = torch.promote_types(torch.float32, b.dtype)
    return b.reshape(-1, b.shape[-1]).to(compute_dtype).sum(dim=0).to(dtype)
