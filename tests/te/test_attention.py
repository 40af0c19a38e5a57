"""`DotProductAttention` against torch's scaled dot product attention, and its masks."""

import pytest
import torch
import torch.nn.functional as F

from sim.te.attention import DotProductAttention
from sim.te.attention_mask import full_mask

SEQLEN, BATCH, HEADS, CHANNELS = 5, 2, 4, 3


def query_key_value(groups: int = HEADS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(SEQLEN, BATCH, heads, CHANNELS, generator=generator).requires_grad_()
        for heads in (HEADS, groups, groups)
    )


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        *(layer.permute(1, 2, 0, 3) for layer in (query, key, value)),
        attn_mask=visible,
        enable_gqa=True,
    )
    return out.permute(2, 0, 1, 3).reshape(SEQLEN, BATCH, -1)


def hidden(mask_type: str, window: tuple[int, int] = (-1, -1), keys: int = 3) -> list[list[int]]:
    mask = full_mask(3, keys, mask_type, None, window, "self", None, torch.device("cpu"))[1]
    return mask[0, 0].int().tolist()


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_causal_attention_equals_torch(groups: int) -> None:
    """Fewer groups than heads is grouped-query attention."""
    layers = query_key_value(groups)
    module = DotProductAttention(HEADS, CHANNELS, num_gqa_groups=groups)
    visible = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    out, expected = module(*layers), reference(*layers, visible)
    torch.testing.assert_close(out, expected)
    factor = torch.linspace(0, 1, out.numel()).view(out.shape)
    torch.testing.assert_close(
        torch.autograd.grad((out * factor).sum(), layers),
        torch.autograd.grad((expected * factor).sum(), layers),
    )


def test_bshd_attention_equals_sbhd() -> None:
    layers = query_key_value()
    module = DotProductAttention(HEADS, CHANNELS)
    out = module(*(layer.transpose(0, 1) for layer in layers), qkv_format="bshd")
    torch.testing.assert_close(out.transpose(0, 1), module(*layers))


def test_explicit_mask_hides_where_true() -> None:
    layers = query_key_value()
    mask = torch.zeros(BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bool)
    mask[1, :, :, 3:] = True
    out = DotProductAttention(HEADS, CHANNELS)(
        *layers, attention_mask=mask, attn_mask_type="arbitrary"
    )
    torch.testing.assert_close(out, reference(*layers, ~mask))


def test_padding_mask_hides_padded_keys_and_zeroes_padded_queries() -> None:
    layers = query_key_value()
    padded = torch.zeros(BATCH, 1, 1, SEQLEN, dtype=torch.bool)
    padded[1, :, :, 3:] = True
    out = DotProductAttention(HEADS, CHANNELS)(
        *layers, attention_mask=padded, attn_mask_type="padding"
    )
    expected = reference(*layers, ~padded)
    torch.testing.assert_close(out[:3], expected[:3])
    assert torch.equal(out[3:, 1], torch.zeros_like(out[3:, 1]))


def test_no_mask_ignores_a_given_mask() -> None:
    layers = query_key_value()
    mask = torch.ones(1, 1, SEQLEN, SEQLEN, dtype=torch.bool)
    module = DotProductAttention(HEADS, CHANNELS)
    out = module(*layers, attention_mask=mask, attn_mask_type="no_mask")
    torch.testing.assert_close(out, reference(*layers, None))


def test_softmax_scale_and_bias_enter_the_scores() -> None:
    layers = query_key_value()
    bias = torch.randn(1, HEADS, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(1))
    out = DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask", softmax_scale=0.5)(
        *layers, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    query, key, value = (layer.permute(1, 2, 0, 3) for layer in layers)
    expected = torch.softmax(0.5 * query @ key.mT + bias, dim=-1) @ value
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).reshape(out.shape))


def test_causal_mask_starts_in_the_top_left_corner() -> None:
    assert hidden("causal") == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert hidden("causal", keys=4) == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_bottom_right_mask_ends_in_the_bottom_right_corner() -> None:
    assert hidden("causal_bottom_right", keys=4) == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_window_limits_how_far_a_query_looks_back() -> None:
    assert hidden("causal", window=(1, 0)) == [[0, 1, 1], [0, 0, 1], [1, 0, 0]]


def test_window_counts_even_under_no_mask() -> None:
    """TE turns the mask type into `arbitrary`, so that the window is not dropped."""
    mask_type, _ = full_mask(3, 3, "no_mask", None, (1, 1), "self", None, torch.device("cpu"))
    assert mask_type == "arbitrary"
    assert hidden("no_mask", window=(1, 1)) == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_forward_calls_the_unfused_child_and_its_children_in_order() -> None:
    """Hooks on every submodule must fire where the real module's fire."""
    module = DotProductAttention(HEADS, CHANNELS)
    called = []
    for name, child in module.named_modules():
        child.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    module(*query_key_value())
    assert called == [
        "",
        "unfused_attention",
        "unfused_attention.scale_mask_softmax",
        "unfused_attention.attention_dropout",
    ]


@pytest.mark.parametrize("child", ["flash_attention", "fused_attention"])
def test_other_backends_refuse(child: str) -> None:
    with pytest.raises(NotImplementedError, match="attention backend"):
        getattr(DotProductAttention(HEADS, CHANNELS), child)()
