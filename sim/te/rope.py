"""Rotary position embedding.

Source: transformer_engine 2.17.1, `pytorch/attention/rope.py`.
"""

import torch

from sim.te.refusal import refuse_if


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotates the leading `freqs.shape[-1]` channels of `t` by their position's angles.

    `t` is [s, b, h, d] (`sbhd`) or [b, s, h, d] (`bshd`); `freqs` are angles in radians, of shape
    [at least s, 1, 1, at most d]. `interleaved` pairs neighbouring channels instead of the two
    halves. `fused` computes in fp32 and rounds once, as the kernel does; otherwise sine and cosine
    are rounded to t's dtype first.

    Returns:
        A tensor like `t`; channels beyond the rotated ones are unchanged.

    Raises:
        NotImplementedError: packed sequences, start positions, or context parallelism.
    """
    refuse_if(
        tensor_format not in ("sbhd", "bshd") or cu_seqlens is not None, "packed rotary embedding"
    )
    refuse_if(start_positions is not None, "rotary embedding with start positions")
    refuse_if(cp_size > 1, "context parallelism")
    del cp_rank
    angles = freqs[: t.shape[0 if tensor_format == "sbhd" else 1]]
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    compute_dtype = torch.promote_types(torch.float32, t.dtype) if fused else t.dtype
    cosine, sine = torch.cos(angles).to(compute_dtype), torch.sin(angles).to(compute_dtype)
    width = angles.shape[-1]
    rotated, unchanged = t[..., :width].to(compute_dtype), t[..., width:]
    rotated = rotated * cosine + _quarter_turn(rotated, interleaved) * sine
    return torch.cat((rotated.to(t.dtype), unchanged), dim=-1)


def _quarter_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
