"""Rotary embedding against rotation written out."""

import pytest
import torch

from sim.te.rope import apply_rotary_pos_emb

ANGLES_S3_D4 = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1) * torch.tensor([1.0, 2, 1, 2])


@pytest.mark.parametrize("fused", [False, True])
def test_rope_rotates_the_two_halves(fused: bool) -> None:
    t = torch.randn(3, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    out = apply_rotary_pos_emb(t, ANGLES_S3_D4, fused=fused)
    pairs = torch.complex(t[..., :2], t[..., 2:])
    rotated = pairs * torch.polar(torch.ones(3, 1, 1, 2), ANGLES_S3_D4[..., :2])
    torch.testing.assert_close(out, torch.cat((rotated.real, rotated.imag), dim=-1))


def test_interleaved_rope_rotates_neighbours() -> None:
    t = torch.randn(3, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    angles = ANGLES_S3_D4[..., [0, 0, 1, 1]]
    out = apply_rotary_pos_emb(t, angles, interleaved=True)
    rotated = torch.view_as_complex(t.view(3, 2, 1, 2, 2)) * torch.polar(
        torch.ones(3, 1, 1, 2), ANGLES_S3_D4[..., :2]
    )
    torch.testing.assert_close(out, torch.view_as_real(rotated).flatten(-2))


def test_bshd_rope_equals_sbhd() -> None:
    t = torch.randn(3, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    out = apply_rotary_pos_emb(t.transpose(0, 1), ANGLES_S3_D4, tensor_format="bshd")
    torch.testing.assert_close(out.transpose(0, 1), apply_rotary_pos_emb(t, ANGLES_S3_D4))


def test_rope_leaves_channels_beyond_the_angles() -> None:
    t = torch.ones(3, 1, 1, 6)
    assert torch.equal(apply_rotary_pos_emb(t, ANGLES_S3_D4)[..., 4:], t[..., 4:])


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"tensor_format": "thd"}, "packed rotary embedding"),
        ({"start_positions": torch.zeros(1)}, "rotary embedding with start positions"),
        ({"cp_size": 2}, "context parallelism"),
    ],
    ids=["thd", "start_positions", "cp"],
)
def test_rope_refuses(options: dict[str, object], feature: str) -> None:
    with pytest.raises(NotImplementedError, match=f"does not model {feature}"):
        apply_rotary_pos_emb(torch.ones(3, 1, 1, 4), ANGLES_S3_D4, **options)
