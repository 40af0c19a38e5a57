"""The mask that a mask type, an explicit mask and a sliding window amount to.

Source: transformer_engine 2.17.1, `pytorch/attention/dot_product_attention/utils.py`.
"""

import torch

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def full_mask(
    seqlen_q: int,
    seqlen_kv: int,
    attn_mask_type: str,
    attention_mask: Mask | None,
    window_size: tuple[int, int],
    attention_type: str,
    bottom_right_diagonal: bool | None,
    device: torch.device,
) -> tuple[str, torch.Tensor]:
    """Returns (mask type to apply, mask [1 or b, 1, sq, sk], True where hidden).

    A query at position i sees key j when `i + shift - left <= j <= i + shift + right`. `shift`
    moves the diagonal to the bottom right corner; (left, right) is `window_size` with -1 for
    unlimited; causal types have right = 0. A window turns the type into `arbitrary`, so that it
    counts even under `no_mask`.

    The explicit mask is the padding [b, 1, 1, s] for padding types (a pair for cross attention),
    else anything that broadcasts to [b, h, sq, sk]. `bottom_right_diagonal` None means the default
    of the type: the top left corner for `causal` and `padding_causal`, else the bottom right one.

    Raises:
        ValueError: a padding type without an explicit mask.
    """
    causal = "causal" in attn_mask_type
    has_window = window_size[0] != -1 or window_size[1] not in (-1, 0)
    bottom_right = bottom_right_diagonal
    if attn_mask_type in ("causal", "padding_causal"):
        bottom_right = False
    elif "bottom_right" in attn_mask_type or bottom_right is None:
        bottom_right = True
    lengths: tuple[torch.Tensor, torch.Tensor] | None = None
    explicit: torch.Tensor | None = None
    if "padding" in attn_mask_type:
        explicit = _padding_mask(attn_mask_type, attention_mask, attention_type)
        visible = ~explicit
        lengths = (visible[:, 0, :, 0].sum(dim=1), visible[:, 0, 0, :].sum(dim=1))
    elif attention_mask is not None:
        explicit = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask[0]
    # The same operators on the same types as TE: at long sequences they take time on a GPU.
    left = seqlen_kv if window_size[0] == -1 else window_size[0]
    right = 0 if causal else seqlen_q if window_size[1] == -1 else window_size[1]
    distance = torch.arange(seqlen_q, dtype=torch.int32, device=device).view(
        1, 1, -1, 1
    ) - torch.arange(seqlen_kv, dtype=torch.int32, device=device).view(1, 1, 1, -1)
    if not bottom_right:
        too_early, too_late = distance - left, distance + right
    elif lengths is None:
        too_early = distance + seqlen_kv - seqlen_q - left
        too_late = distance + seqlen_kv - seqlen_q + right
    else:
        # Padded sequences have a corner each, at the end of their real tokens.
        shift = lengths[1] - lengths[0]
        too_early = distance + (shift - left).view(-1, 1, 1, 1)
        too_late = distance + (shift + right).view(-1, 1, 1, 1)
    mask = torch.logical_not((too_early <= 0) & ~(too_late < 0))
    if explicit is not None:
        mask = torch.logical_or(mask, explicit)
    return ("arbitrary" if has_window else attn_mask_type), mask


def _padding_mask(
    attn_mask_type: str, attention_mask: Mask | None, attention_type: str
) -> torch.Tensor:
    if attention_mask is None:
        raise ValueError(f"Expected an attention mask with mask type {attn_mask_type!r}, got None.")
    if attention_type == "self":
        assert isinstance(attention_mask, torch.Tensor)
        queries = keys = attention_mask
    else:
        queries, keys = attention_mask
    return queries.squeeze(1).unsqueeze(3) | keys
