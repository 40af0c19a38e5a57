"""The kernels that calibration times, each with the name and shapes that a trace would have.

Names are those of traces: torch's operators, and `te:` for kernels of Transformer Engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from real.gpu.measure import Work, device_us

_BYTES_IN_TURN: Final = 200_000_000
"""Pieces of work take turns over at least so much memory: more than a cache holds."""

_DTYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed.

    Attributes:
        tokens: Numbers of rows.
        hidden: Widths of a model.
        sequences: Lengths for attention.
        vocab: Width of the output layer.
        repeats: Repeats of each kernel.
    """

    tokens: Sequence[int] = (1024, 2048, 4096, 8192)
    hidden: Sequence[int] = (1024, 2048, 4096)
    sequences: Sequence[int] = (1024, 2048, 4096)
    vocab: int = 32768
    repeats: int = 12


TINY: Final = Sizes(tokens=(16,), hidden=(32,), sequences=(16,), vocab=64, repeats=2)
"""Sizes for a machine without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size.

    Attributes:
        name: Its name in a trace.
        inputs: Makes what it reads, and what it writes in place.
        run: Runs it and returns what is new.
        calls: Kernels that one run launches, all of this name.
        shapes: What each of them reads and writes, where that is not `inputs` and the result.
    """

    name: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    run: Callable[..., Any]
    calls: int = 1
    shapes: tuple[tuple[int, ...], ...] | None = None


def time_kernels(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields name, shapes and microseconds of every kernel at every size.

    One that cannot run here is yielded with what went wrong in place of the time.
    """
    for case in cases(device, sizes):
        try:
            yield _time_case(case, device, sizes.repeats)
        except Exception as error:  # noqa: BLE001 - one kernel less is better than no calibration
            yield {"name": case.name, "error": f"{type(error).__name__}: {error}"[:300]}


def _time_case(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    first = case.inputs()
    num_bytes = sum(tensor.nbytes for tensor in first)
    turns = min(max(_BYTES_IN_TURN // max(num_bytes, 1), 1), 8)
    if device.type != "cuda":
        turns = 1
    inputs = [first, *(case.inputs() for _ in range(turns - 1))]
    result = case.run(*first)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
    pieces: list[Work] = [functools.partial(case.run, *given) for given in inputs]
    microseconds = device_us(pieces, device=device, repeats=repeats)
    return {
        "name": case.name,
        "shapes": [_describe(tensor) for tensor in (*first, *outputs)]
        if case.shapes is None
        else [["bf16", *shape] for shape in case.shapes],
        "us": round(microseconds / case.calls, 3),
    }


def _describe(tensor: torch.Tensor) -> list[Any]:
    return [_DTYPES.get(tensor.dtype, str(tensor.dtype)), *tensor.shape]


def cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yields every kernel at every size."""
    yield from _gemms(device, sizes)
    yield from _expert_gemms(device, sizes)
    yield from _attention(device, sizes)
    yield from _rows(device, sizes)
    yield from _router(device, sizes)
    yield from _output_layer(device, sizes)


_Tensors = tuple[torch.Tensor, ...]
_Maker = Callable[[], _Tensors]


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def _maker(device: torch.device, *shapes: Sequence[int]) -> _Maker:
    """Returns what makes random bf16 tensors of the given shapes."""
    return lambda: tuple(_random(device, *shape) for shape in shapes)


# -- matrix products --------------------------------------------------------------------------


def _gemms(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def product(layout: str) -> Callable[..., Any]:
        return lambda a, b: general_gemm(a, b, torch.bfloat16, layout=layout)[0]

    for tokens in sizes.tokens:
        for hidden in sizes.hidden:
            for width in (8, hidden, 2 * hidden, 3 * hidden):
                shapes = {
                    "TN": ((width, hidden), (tokens, hidden)),
                    "NN": ((width, hidden), (tokens, width)),
                    "NT": ((tokens, hidden), (tokens, width)),
                }
                for layout, (a, b) in shapes.items():
                    yield Case(
                        name=f"te:gemm_{layout}",
                        inputs=_maker(device, a, b),
                        run=product(layout),
                    )


def _expert_gemms(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Four experts at once, as Transformer Engine launches them: on several streams."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    experts = 4

    def grouped(layout: str) -> Callable[..., Any]:
        def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            rows = b.shape[0]
            packed = layout != "NT"
            general_grouped_gemm(
                [a] * experts,
                [b] * experts,
                [out] if packed else list(out),
                [None] * experts,
                torch.bfloat16,
                layout=layout,
                m_splits=[rows] * experts,
                grad=layout != "TN",
                single_output=packed,
            )

        return run

    for tokens in sizes.tokens:
        for hidden in sizes.hidden:
            for fan_in, fan_out in ((hidden, 2 * hidden), (hidden, hidden)):
                shapes: dict[str, tuple[tuple[int, ...], ...]] = {
                    "TN": ((fan_out, fan_in), (tokens, fan_in), (experts * tokens, fan_out)),
                    "NN": ((fan_out, fan_in), (tokens, fan_out), (experts * tokens, fan_in)),
                    "NT": ((tokens, fan_in), (tokens, fan_out), (experts, fan_out, fan_in)),
                }
                for layout, three in shapes.items():
                    packed = three[2]
                    one = packed[1:] if layout == "NT" else (tokens, packed[1])
                    yield Case(
                        name=f"te:expert_gemm_{layout}",
                        inputs=_maker(device, *three),
                        run=grouped(layout),
                        calls=experts,
                        shapes=(*three[:2], one),
                    )


# -- attention --------------------------------------------------------------------------------


def _attention(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    for sequence in sizes.sequences:
        for hidden in sizes.hidden:
            heads = max(hidden // 128, 1)
            yield from _attention_products(device, sequence, heads, hidden // heads)
            yield from _softmax(device, heads, sequence)
        yield from _mask(device, sequence)


def _attention_products(
    device: torch.device, sequence: int, heads: int, width: int
) -> Iterator[Case]:
    """Scores, context, and the gradients of both, with the strides of [sequence, heads, width]."""

    def rows() -> torch.Tensor:
        return _random(device, sequence, heads, width).transpose(0, 1)

    def scores() -> torch.Tensor:
        return _random(device, heads, sequence, sequence)

    yield Case(
        name="baddbmm",
        inputs=lambda: (scores(), rows(), rows().transpose(1, 2)),
        run=lambda out, q, k: torch.baddbmm(out, q, k, beta=0.0, alpha=0.1),
    )
    yield Case(name="bmm", inputs=lambda: (scores(), rows()), run=torch.bmm)
    yield Case(name="bmm", inputs=lambda: (scores().transpose(1, 2), rows()), run=torch.bmm)
    yield Case(name="bmm", inputs=lambda: (rows(), rows().transpose(1, 2)), run=torch.bmm)


def _softmax(device: torch.device, heads: int, sequence: int) -> Iterator[Case]:
    try:
        import transformer_engine_torch as extension  # type: ignore[import-not-found]
    except ImportError:
        return
    shape = (1, heads, sequence, sequence)

    def forward(scores: torch.Tensor, mask: torch.Tensor) -> Any:
        return extension.scaled_masked_softmax_forward(scores, mask, 1.0)

    def backward(weights: torch.Tensor, grad: torch.Tensor) -> None:
        extension.scaled_masked_softmax_backward(grad, weights, 1.0)

    def mask() -> torch.Tensor:
        ones = torch.ones(1, 1, sequence, sequence, device=device, dtype=torch.bool)
        return ones.triu(1)

    yield Case(
        name="te:masked_softmax_forward",
        inputs=lambda: (_random(device, *shape), mask()),
        run=forward,
    )
    yield Case(
        name="te:masked_softmax_backward",
        inputs=lambda: (_random(device, *shape), _random(device, *shape)),
        run=backward,
    )


def _mask(device: torch.device, sequence: int) -> Iterator[Case]:
    def distance() -> torch.Tensor:
        return torch.zeros(1, 1, sequence, sequence, device=device, dtype=torch.int32)

    yield Case(name="add", inputs=lambda: (distance(),), run=lambda d: d + 3)
    yield Case(name="le", inputs=lambda: (distance(),), run=lambda d: d <= 0)
    yield Case(
        name="bitwise_and",
        inputs=lambda: (distance() <= 0, distance() <= 1),
        run=lambda a, b: a & b,
    )


# -- rows of tokens ---------------------------------------------------------------------------

_Unary = Callable[[torch.Tensor], torch.Tensor]


def _rows(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.tokens:
        for hidden in sizes.hidden:
            yield from _pointwise(device, tokens, hidden)
            yield from _moved_rows(device, tokens, hidden)
            yield from _norms(device, tokens, hidden)


def _pointwise(device: torch.device, tokens: int, hidden: int) -> Iterator[Case]:
    def one(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        return (_random(device, tokens, hidden, dtype=dtype),)

    def two() -> tuple[torch.Tensor, ...]:
        return (*one(), *one())

    half = hidden // 2
    yield Case(name="add", inputs=two, run=torch.add)
    yield Case(name="mul", inputs=two, run=torch.mul)
    yield Case(
        name="mul",  # by one number a row
        inputs=lambda: (*one(), _random(device, tokens, 1)),
        run=torch.mul,
    )
    yield Case(name="add_", inputs=two, run=lambda a, b: _nothing(a.add_(b)))
    yield Case(
        name="add_",  # into a float32 accumulator
        inputs=lambda: (*one(), *one(torch.float32)),
        run=lambda a, b: _nothing(b.add_(a)),
    )
    yield Case(name="neg", inputs=one, run=torch.neg)
    yield Case(name="silu", inputs=one, run=functional.silu)
    yield Case(name="silu_backward", inputs=two, run=torch.ops.aten.silu_backward)
    yield Case(name="clone", inputs=one, run=torch.clone)
    yield Case(name="copy_", inputs=two, run=lambda a, b: _nothing(b.copy_(a)))
    yield Case(
        name="copy_",
        inputs=lambda: (*one(), *one(torch.float32)),
        run=lambda a, b: _nothing(b.copy_(a)),
    )
    yield Case(name="_to_copy", inputs=one, run=lambda a: a.float())
    yield Case(name="_to_copy", inputs=lambda: one(torch.float32), run=lambda a: a.bfloat16())
    yield Case(name="sum", inputs=one, run=lambda a: a.sum(-1, keepdim=True))
    yield Case(name="cat", inputs=two, run=lambda a, b: torch.cat((a, b)))
    yield Case(
        name="cat",
        inputs=lambda: (_random(device, tokens, half), _random(device, tokens, half)),
        run=lambda a, b: torch.cat((a, b), dim=-1),
    )
    yield Case(
        name="slice_backward",
        inputs=lambda: (_random(device, tokens, half),),
        run=lambda a: torch.ops.aten.slice_backward(a, [tokens, hidden], 1, 0, half, 1),
    )
    yield Case(
        name="new_zeros",
        inputs=lambda: (),
        run=lambda: torch.zeros(tokens, hidden, device=device, dtype=torch.bfloat16),
    )


def _nothing(_: torch.Tensor) -> None:
    """In-place kernels return nothing new."""


def _moved_rows(device: torch.device, tokens: int, hidden: int) -> Iterator[Case]:
    chosen = 2 * tokens

    def indices() -> torch.Tensor:
        return torch.randint(tokens, (chosen,), device=device)

    def spread() -> torch.Tensor:
        return indices().unsqueeze(1).expand(-1, hidden)

    yield Case(
        name="index_select",
        inputs=lambda: (_random(device, tokens, hidden), indices()),
        run=lambda a, i: a.index_select(0, i),
    )
    yield Case(
        name="index_add",
        inputs=lambda: (
            _random(device, tokens, hidden),
            indices(),
            _random(device, chosen, hidden),
        ),
        run=lambda a, i, rows: a.index_add(0, i, rows),
    )
    yield Case(
        name="scatter_add_",
        inputs=lambda: (
            spread(),
            _random(device, chosen, hidden),
            _random(device, tokens, hidden),
        ),
        run=lambda i, rows, a: _nothing(a.scatter_add_(0, i, rows)),
    )
    yield Case(
        name="gather",
        inputs=lambda: (_random(device, tokens, hidden), spread()),
        run=lambda a, i: a.gather(0, i),
    )


def _norms(device: torch.device, tokens: int, hidden: int) -> Iterator[Case]:
    from transformer_engine.pytorch import RMSNorm

    module = RMSNorm(hidden).to(device=device, dtype=torch.bfloat16)
    statistics = torch.empty(tokens, 1, device=device, dtype=torch.float32)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(x), statistics

    def rows() -> tuple[torch.Tensor, ...]:
        return (_random(device, tokens, hidden), module.weight.detach())

    yield Case(name="te:rmsnorm_forward", inputs=rows, run=forward)
    try:
        import transformer_engine_torch as extension
    except ImportError:
        return

    def backward(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
    ) -> Any:
        return extension.rmsnorm_bwd(grad, x, inverse, weight, 0, False)

    def saved() -> tuple[torch.Tensor, ...]:
        return (
            _random(device, tokens, hidden),
            *rows(),
            torch.ones(tokens, device=device, dtype=torch.float32),
        )

    # Both of its kernels; the second one is small.
    yield Case(name="te:rmsnorm_backward", inputs=saved, run=backward)


# -- router and output layer ------------------------------------------------------------------


def _router(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    experts = 8
    for tokens in sizes.tokens:

        def scores(tokens: int = tokens) -> tuple[torch.Tensor, ...]:
            return (_random(device, tokens, experts, dtype=torch.float32),)

        def routing(tokens: int = tokens) -> tuple[torch.Tensor, ...]:
            return (torch.rand(experts * tokens, device=device) > 0.75,)

        yield Case(name="topk", inputs=scores, run=lambda s: torch.topk(s, 2, dim=1))
        yield Case(name="_softmax", inputs=scores, run=lambda s: torch.softmax(s, dim=-1))
        yield Case(
            name="sort",
            inputs=routing,
            run=lambda m: torch.sort(m, descending=True, stable=True),
        )
        yield Case(name="sum", inputs=scores, run=lambda s: s.sum(dim=0))


def _output_layer(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    vocab = sizes.vocab
    for tokens in sizes.tokens[:3]:
        for hidden in sizes.hidden:
            for a, b in (
                ((tokens, hidden), (hidden, vocab)),
                ((tokens, vocab), (vocab, hidden)),
                ((vocab, tokens), (tokens, hidden)),
            ):
                yield Case(
                    name="mm",
                    inputs=_maker(device, a, b),
                    run=torch.mm,
                )
        yield from _cross_entropy(device, tokens, vocab)


def _cross_entropy(device: torch.device, tokens: int, vocab: int) -> Iterator[Case]:
    def logits() -> tuple[torch.Tensor, ...]:
        return (_random(device, tokens, vocab, dtype=torch.float32),)

    yield Case(name="max", inputs=logits, run=lambda x: torch.max(x, dim=-1))
    yield Case(name="exp", inputs=logits, run=torch.exp)
    yield Case(name="sum", inputs=logits, run=lambda x: x.sum(-1))
    yield Case(name="div_", inputs=logits, run=lambda x: _nothing(x.div_(1.5)))
    yield Case(
        name="embedding",
        inputs=lambda: (
            _random(device, vocab, 1024),
            torch.randint(vocab, (tokens,), device=device),
        ),
        run=lambda w, i: functional.embedding(i, w),
    )
    yield Case(
        name="embedding_dense_backward",
        inputs=lambda: (
            _random(device, tokens, 1024),
            torch.randint(vocab, (tokens,), device=device),
        ),
        run=lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, vocab, -1, False),
    )
