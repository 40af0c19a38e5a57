"""`DotProductAttention` with the submodules of the real one; only the unfused backend computes.

The real module owns three backends as children and picks one at each forward. All three exist here,
because a hook placed on every submodule sees them; the forward calls `unfused_attention`.

Source: transformer_engine 2.17.1, `pytorch/attention/dot_product_attention/`, files
`dot_product_attention.py`, `backends.py`, `softmax.py`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from sim.cuda.shapes import kernel
from sim.te.affine import SavedContext
from sim.te.attention_mask import MASK_TYPES, full_mask
from sim.te.base import RngStatesTracker, TransformerEngineBaseModule
from sim.te.refusal import not_modelled, refuse_if

# Written over masked scores. Finite as in TE: a fully masked row attends evenly, it is not NaN.
MASKED_SCORE = -10000.0
QKV_FORMATS = ("sbhd", "bshd")


class FlashAttention(torch.nn.Module):
    """Backend that exists as a child only."""

    def forward(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        """Refuses.

        Raises:
            NotImplementedError: always.
        """
        raise not_modelled("the flash attention backend")


class FusedAttention(torch.nn.Module):
    """Backend that exists as a child only."""

    def forward(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        """Refuses.

        Raises:
            NotImplementedError: always.
        """
        raise not_modelled("the fused attention backend")


class _MaskedSoftmax(torch.autograd.Function):
    """One kernel each way; keeps the rounded probabilities, and its gradient is made in place."""

    @staticmethod
    def forward(ctx: SavedContext, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with kernel("te:masked_softmax_forward", reads=(scores, mask)) as launch:
            wide = scores.float()
            if mask is not None:
                wide = wide.masked_fill(mask, MASKED_SCORE)
            probabilities = torch.softmax(wide, dim=-1).to(scores.dtype)
            launch.writes = (probabilities,)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: SavedContext, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        assert probabilities is not None
        grad = grad_output.contiguous()
        with kernel("te:masked_softmax_backward", reads=(probabilities,), updates=(grad,)):
            wide, weights = grad.float(), probabilities.float()
            product = wide * weights
            grad.copy_(product - weights * product.sum(dim=-1, keepdim=True))
        return grad, None


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Masked softmax over the last dimension, computed in fp32 or better."""

    def forward(
        self, inp: torch.Tensor, mask: torch.Tensor | None, attn_mask_type: str
    ) -> torch.Tensor:
        """Returns probabilities of inp's dtype; `mask` [1 or b, 1, sq, sk] is True where hidden."""
        if attn_mask_type == "no_mask":
            mask = None
        if inp.dtype in (torch.bfloat16, torch.float16):
            return _MaskedSoftmax.apply(inp, mask)  # type: ignore[no-any-return]
        scores = inp.to(torch.promote_types(torch.float32, inp.dtype))
        if mask is not None:
            scores = scores.masked_fill(mask, MASKED_SCORE)
        return torch.softmax(scores, dim=-1).to(inp.dtype)


class UnfusedDotProductAttention(torch.nn.Module):
    """Scores, masked softmax, dropout, context; each an ordinary torch operation."""

    def __init__(
        self,
        softmax_scale: float,
        attention_type: str = "self",
        attention_dropout: float = 0.0,
        attention_dropout_ctx: Callable[[], AbstractContextManager[None]] = nullcontext,
        layer_number: int | None = None,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.attention_type = attention_type
        self.attention_dropout_ctx = attention_dropout_ctx
        self.layer_number = layer_number
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        qkv_format: str,
        attn_mask_type: str,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
        window_size: tuple[int, int],
        bottom_right_diagonal: bool | None,
        core_attention_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends; see `DotProductAttention.forward` for shapes.

        `core_attention_bias` is added to the scaled scores [b, h, sq, sk].
        """
        if qkv_format == "bshd":
            query_layer, key_layer, value_layer = (
                layer.transpose(0, 1) for layer in (query_layer, key_layer, value_layer)
            )
        seqlen_q, batch, heads, _ = query_layer.shape
        seqlen_kv, _, groups, value_size = value_layer.shape
        if groups != heads:
            # Consecutive query heads share a group.
            key_layer = key_layer.repeat_interleave(heads // groups, dim=2)
            value_layer = value_layer.repeat_interleave(heads // groups, dim=2)
        mask_type, mask = full_mask(
            seqlen_q, seqlen_kv, attn_mask_type, attention_mask, window_size, self.attention_type,
            bottom_right_diagonal, query_layer.device,
        )  # fmt: skip
        query, key, value = (
            layer.reshape(layer.shape[0], batch * heads, -1).transpose(0, 1)
            for layer in (query_layer, key_layer, value_layer)
        )
        # TE makes room for the scores and multiplies into new room all the same.
        room = query.new_empty(batch * heads, seqlen_q, seqlen_kv)
        scores = torch.baddbmm(
            room, query, key.transpose(1, 2), beta=0.0, alpha=self.softmax_scale
        ).view(batch, heads, seqlen_q, seqlen_kv)
        if core_attention_bias is not None:
            scores = (scores + core_attention_bias).to(query.dtype)
        probabilities = self.scale_mask_softmax(scores, mask, mask_type)
        if "padding" in mask_type:
            assert mask is not None
            probabilities = probabilities.masked_fill(mask, 0)
        with self.attention_dropout_ctx():
            probabilities = self.attention_dropout(probabilities)
        context = torch.bmm(probabilities.view(batch * heads, seqlen_q, seqlen_kv), value)
        context = context.view(batch, heads, seqlen_q, value_size)
        if qkv_format == "sbhd":
            return context.permute(2, 0, 1, 3).contiguous().view(seqlen_q, batch, -1)
        return context.permute(0, 2, 1, 3).contiguous().view(batch, seqlen_q, -1)


class DotProductAttention(TransformerEngineBaseModule):
    """Attention over given query, key and value.

    Grouped keys and values are repeated for the query heads that share them.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], RngStatesTracker] | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: object = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        """Builds the module; it has no parameters.

        `softmax_scale` is a factor on the scores; None means 1/sqrt(key channels).

        Raises:
            ValueError: the heads cannot be divided into the groups.
            NotImplementedError: context parallelism, a sink softmax, or max logits are asked for.
        """
        super().__init__(name)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        refuse_if(softmax_type != "vanilla", f"softmax_type {softmax_type!r}")
        refuse_if(return_max_logit, "return_max_logit")
        self._set_tensor_parallel(tp_group, tp_size, None)
        self.qkv_format = qkv_format
        self.attn_mask_type = _canonical_mask_type(attn_mask_type)
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = self.num_gqa_groups
        if num_attention_heads % self.num_gqa_groups != 0:
            raise ValueError(
                f"Cannot divide {num_attention_heads} heads into {self.num_gqa_groups} groups."
            )
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        self.softmax_type, self.softmax_offset, self.return_max_logit = softmax_type, None, False
        key_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.hidden_size_per_attention_head_k = key_channels
        self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, int) else kv_channels[1]
        )
        self.get_rng_state_tracker = get_rng_state_tracker
        dropout_ctx: Callable[[], AbstractContextManager[None]] = nullcontext
        if get_rng_state_tracker is not None and not sequence_parallel:
            dropout_ctx = get_rng_state_tracker().fork
        self.flash_attention = FlashAttention()
        self.fused_attention = FusedAttention()
        self.unfused_attention = UnfusedDotProductAttention(
            1.0 / math.sqrt(key_channels) if softmax_scale is None else softmax_scale,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            attention_dropout_ctx=dropout_ctx,
            layer_number=layer_number,
        )

    def set_context_parallel_group(
        self,
        cp_group: object,
        cp_global_ranks: list[int] | None,
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Accepts the absence of context parallelism.

        Raises:
            NotImplementedError: a group is given.
        """
        refuse_if(cp_group is not None, "context parallelism")
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
        score_mod: object = None,
    ) -> torch.Tensor:
        """Attends and returns [s, b, h * d] (sbhd) or [b, s, h * d] (bshd).

        Query, key and value are [s, b, h, d] or [b, s, h, d]; keys and values may have fewer heads.
        The mask is True where hidden; see `attention_mask.full_mask`. `fast_zero_fill` and
        `num_splits` tune kernels and have no effect here.

        Raises:
            ValueError: unknown mask type.
            NotImplementedError: packed sequences, alibi, inference, checkpointing, or FP8.
        """
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        refuse_if(qkv_format not in QKV_FORMATS, f"qkv_format {qkv_format!r}")
        refuse_if(
            any(length is not None for length in lengths) or pad_between_seqs, "packed sequences"
        )
        refuse_if(checkpoint_core_attention, "checkpointed attention")
        refuse_if(alibi_slopes is not None, "alibi")
        refuse_if(inference_params is not None, "attention with a key-value cache")
        refuse_if(fp8_output, "FP8")
        refuse_if(score_mod is not None, "score_mod")
        refuse_if(
            core_attention_bias_type not in ("no_bias", "post_scale_bias"),
            f"core_attention_bias_type {core_attention_bias_type!r}",
        )
        mask_type = (
            self.attn_mask_type if attn_mask_type is None else _canonical_mask_type(attn_mask_type)
        )
        window = self.window_size if window_size is None else window_size
        diagonal = (
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        )
        return self.unfused_attention(  # type: ignore[no-any-return]
            query_layer,
            key_layer,
            value_layer,
            qkv_format,
            mask_type,
            attention_mask,
            (-1, -1) if window is None else window,
            diagonal,
            core_attention_bias if core_attention_bias_type == "post_scale_bias" else None,
        )


def _canonical_mask_type(attn_mask_type: str) -> str:
    mask_type = attn_mask_type.replace(",", "_")
    mask_type = "padding_causal" if mask_type == "causal_padding" else mask_type
    if mask_type not in MASK_TYPES:
        raise ValueError(
            f"Expected an attention mask type in {MASK_TYPES}, got {attn_mask_type!r}."
        )
    return mask_type
