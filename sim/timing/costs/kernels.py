"""What a kernel does, from its name and the shapes of its tensors: its class, flops and bytes.

Names are those of torch operators, and of the fused operators that Transformer Engine has for them.
An operator that is not named here counts as element-wise: it reads and writes each tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

Shape = Sequence[Any]
"""An element type and the sizes after it, as ["bfloat16", 64, 32]."""

_SIZES: Final = {
    "f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1,
    "b8": 1,
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "uint32": 4, "uint64": 8,
}  # fmt: skip
_SPELLINGS: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}

_MATRIX: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addmv", "mv"})
_REDUCTION: Final = frozenset(
    {"sum", "mean", "max", "min", "amax", "amin", "argmax", "all", "any", "var", "norm", "prod",
     "linalg_vector_norm", "_foreach_norm", "cumsum", "topk", "sort", "_softmax", "_log_softmax",
     "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp", "native_layer_norm",
     "native_layer_norm_backward", "rms_norm", "_fused_rms_norm", "_fused_rms_norm_backward",
     "bincount", "histc", "count_nonzero", "nonzero", "isfinite", "nll_loss_forward"}
)  # fmt: skip
_COPY: Final = frozenset(
    {"copy_", "clone", "cat", "stack", "_to_copy", "contiguous", "_foreach_copy_", "fill_",
     "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
     "new_ones", "new_full", "slice_backward", "_copy_from", "split_with_sizes_copy"}
)  # fmt: skip
_GATHERS: Final = frozenset(
    {"embedding", "index", "index_select", "gather", "index_put", "index_put_", "index_add",
     "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "masked_select",
     "embedding_dense_backward", "_unsafe_index", "_unsafe_index_put"}
)  # fmt: skip
_FREE: Final = frozenset({"_unsafe_view", "_local_scalar_dense", "detach", "alias", "set_"})


class Work(NamedTuple):
    """What a kernel does.

    Attributes:
        kind: Its class, one of `costfile.KERNEL_CLASSES`; empty for what launches nothing.
        flops: Multiplications and additions of its matrix products.
        num_bytes: Bytes read and written.
        dtype: Element type of its matrix products.
    """

    kind: str
    flops: float
    num_bytes: float
    dtype: str


def kernel_class(name: str) -> str:
    """Returns the class of a kernel."""
    if name in _MATRIX or ("gemm" in name and "grouped" not in name):
        return "matrix"
    if "grouped" in name and ("mm" in name or "gemm" in name):
        return "grouped_matrix"
    if "attention" in name or "attn" in name:
        return "attention"
    if name in _REDUCTION or "norm" in name or "softmax" in name or "cross_entropy" in name:
        return "reduction"
    if name in _COPY or name in _GATHERS or "permute" in name:
        return "copy"
    if name in _FREE:
        return ""
    return "elementwise"


def variant_of(name: str, shapes: Sequence[Shape]) -> str:
    """Returns the name of a kernel with what sets it apart from others of its name.

    " mixed" is added when it converts between element types, and " spread" when one operand has
    fewer elements than the others: both are other kernels than the plain one, and slower.
    """
    if kernel_class(name) not in ("elementwise", "copy") or name in _GATHERS:
        return name
    data = [shape for shape in shapes if len(shape) > 1]
    if len({shape[0] for shape in data}) > 1:
        return f"{name} mixed"
    return f"{name} spread" if len({_numel(shape) for shape in data}) > 1 else name


def work_of(name: str, shapes: Sequence[Shape]) -> Work:
    """Returns what a kernel does.

    Args:
        name: Its name.
        shapes: Shapes of the tensors that it reads, then of those that it writes.
    """
    kind = kernel_class(name)
    dtype = _spelled(shapes[0][0]) if shapes else "float32"
    if name in _GATHERS and shapes:
        # It touches as much of the large tensor as it moves, however large that is.
        num_bytes = 2.0 * _num_bytes(min(shapes, key=_moved))
    else:
        num_bytes = float(sum(_num_bytes(shape) for shape in shapes))
    flops = 0.0
    if kind == "matrix":
        flops = _matrix_flops(name, shapes)
    elif kind == "grouped_matrix":
        flops = _grouped_flops(shapes)
    elif kind == "attention":
        flops = _attention_flops(name, shapes)
    if flops:
        dtype = _spelled(max(shapes, key=_numel)[0])
    return Work(kind, flops, num_bytes, dtype)


def num_bytes_of(shape: Shape) -> int:
    """Returns the size of a tensor."""
    return _num_bytes(shape)


def _spelled(dtype: str) -> str:
    return _SPELLINGS.get(dtype, dtype)


def _numel(shape: Shape) -> int:
    return math.prod(shape[1:])


def _num_bytes(shape: Shape) -> int:
    return _numel(shape) * _SIZES.get(shape[0], 4)


def _moved(shape: Shape) -> tuple[bool, int]:
    """Sorts floating-point tensors of one or more dimensions by size, and others after them."""
    is_data = "float" in _spelled(shape[0]) and len(shape) > 1
    return (not is_data, _num_bytes(shape))


def _matrix_flops(name: str, shapes: Sequence[Shape]) -> float:
    """Two operations an element of the product and step of the sum, whatever the layout.

    The two factors and the product have m*k, k*n and m*n elements in each of b matrices, so the
    root of the product of the three is m*k*n times the root of b cubed.
    """
    matrices = [shape for shape in shapes if len(shape) > 2]
    if name in ("addmm", "baddbmm"):
        matrices = [*matrices[-3:]]  # the term that is added comes first
    if len(matrices) < 3:
        return 0.0
    first, second, out = matrices[0], matrices[1], matrices[-1]
    batch = math.prod(out[1:-2]) if len(out) > 3 and len(first) == len(second) else 1
    triple = _numel(first) * _numel(second) * _numel(out)
    return 2.0 * math.sqrt(triple) / math.sqrt(max(batch, 1))


def _grouped_flops(shapes: Sequence[Shape]) -> float:
    """The rows of all groups together meet one matrix each.

    Args:
        shapes: The groups' rows, and matrices or rows, then the outputs.
    """
    if len(shapes) < 3:
        return 0.0
    width: int = shapes[0][-1]
    rows = _numel(shapes[0]) // max(width, 1)
    others = [shape for shape in shapes[1:] if len(shape) > 2]
    out = shapes[-1]
    if others and _numel(out) // max(out[-1], 1) == rows:
        return 2.0 * rows * width * int(out[-1])
    other = others[0] if others else out
    return 2.0 * rows * width * int(other[-1])


def _attention_flops(name: str, shapes: Sequence[Shape]) -> float:
    """Two causal products of scores and values; the backward has five in place of two.

    Query, key and value are [sequence, batch, heads, width], as Transformer Engine has them, except
    for torch's own operators: [batch, heads, sequence, width].
    """
    if len(shapes) < 3 or len(shapes[0]) < 5:
        return 0.0
    query = shapes[0]
    sequence: int = query[3] if "scaled_dot_product" in name else query[1]
    flops = 4.0 * _numel(query) * sequence / 2
    is_backward = "backward" in name or "bwd" in name
    return flops * 2.5 if is_backward else flops
