"""`FusedAdam` against torch's Adam, and the multi-tensor functions."""

import pytest
import torch

from sim.te.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_equals_torch(adam_w_mode: bool) -> None:
    ours = torch.nn.Parameter(torch.arange(4.0))
    theirs = torch.nn.Parameter(torch.arange(4.0))
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizers = (
        FusedAdam([ours], lr=0.1, weight_decay=0.01, adam_w_mode=adam_w_mode),
        kind([theirs], lr=0.1, weight_decay=0.01),
    )
    for step in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.full((4,), step - 0.5) * torch.arange(4)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert optimizers[0].param_groups[0]["step"] == 3


def test_fused_adam_keeps_fp32_moments_of_bf16_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = FusedAdam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dtypes = {key: moment.dtype for key, moment in optimizer.state[parameter].items()}
    assert dtypes == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@pytest.mark.parametrize(
    "option", ["amsgrad", "capturable", "master_weights", "use_decoupled_grad"]
)
def test_fused_adam_refuses(option: str) -> None:
    with pytest.raises(NotImplementedError, match="stand-in does not model"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **{option: True})


def test_l2norm_covers_all_tensors() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([0.0, 4.0], dtype=torch.bfloat16)]
    flag = torch.zeros(1, dtype=torch.int)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], True)
    assert norm.tolist() == [5]
    assert each.tolist() == [3, 4]


def test_scale_writes_the_second_list() -> None:
    source, target = [torch.ones(2)], [torch.zeros(2, dtype=torch.bfloat16)]
    flag = torch.zeros(1, dtype=torch.int)
    multi_tensor_applier(multi_tensor_scale, flag, [source, target], 0.5)
    assert target[0].tolist() == [0.5, 0.5]
    multi_tensor_applier(multi_tensor_scale_tensor, flag, [target, target], torch.tensor([2.0]))
    assert target[0].tolist() == [1, 1]
    assert flag.item() == 0


def test_scale_flags_what_is_not_finite() -> None:
    flag = torch.zeros(1, dtype=torch.int)
    tensors = [torch.tensor([torch.inf])]
    multi_tensor_applier(multi_tensor_scale, flag, [tensors, tensors], 1.0)
    assert flag.item() == 1
