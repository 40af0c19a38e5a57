"""Names, order and attributes of modules and parameters, as the real 2.17.1 has them."""

import pytest
import torch

from sim.te.attention import DotProductAttention
from sim.te.grouped_linear import GroupedLinear
from sim.te.layernorm_linear import LayerNormLinear
from sim.te.linear import Linear
from sim.te.norm import LayerNorm, RMSNorm

PARAMETERS = {
    "Linear": (lambda: Linear(2, 3, device="cpu"), ["weight", "bias"]),
    "Linear_without_bias": (lambda: Linear(2, 3, bias=False, device="cpu"), ["weight"]),
    "LayerNormLinear": (
        lambda: LayerNormLinear(2, 3, device="cpu"),
        ["layer_norm_weight", "layer_norm_bias", "weight", "bias"],
    ),
    "LayerNormLinear_of_RMSNorm": (
        lambda: LayerNormLinear(2, 3, bias=False, normalization="RMSNorm", device="cpu"),
        ["layer_norm_weight", "weight"],
    ),
    "GroupedLinear": (
        lambda: GroupedLinear(2, 2, 3, device="cpu"),
        ["weight0", "bias0", "weight1", "bias1"],
    ),
    "GroupedLinear_without_bias": (
        lambda: GroupedLinear(3, 2, 3, bias=False, device="cpu"),
        ["weight0", "weight1", "weight2"],
    ),
    "RMSNorm": (lambda: RMSNorm(2), ["weight"]),
    "LayerNorm": (lambda: LayerNorm(2), ["weight", "bias"]),
    "DotProductAttention": (lambda: DotProductAttention(2, 2), []),
}


@pytest.mark.parametrize("kind", list(PARAMETERS))
def test_parameters_have_the_real_names_in_the_real_order(kind: str) -> None:
    """Their order decides where FSDP puts them in a buffer."""
    build, expected = PARAMETERS[kind]
    assert [name for name, _ in build().named_parameters()] == expected


@pytest.mark.parametrize("kind", list(PARAMETERS))
def test_state_dict_has_an_empty_extra_state(kind: str) -> None:
    build, expected = PARAMETERS[kind]
    state = build().state_dict()
    assert list(state) == [*expected, "_extra_state"]
    assert state["_extra_state"].numel() == 0


def test_attention_has_the_real_tree_of_submodules() -> None:
    modules = DotProductAttention(2, 2).named_modules()
    assert [(name, type(module).__name__) for name, module in modules] == [
        ("", "DotProductAttention"),
        ("flash_attention", "FlashAttention"),
        ("fused_attention", "FusedAttention"),
        ("unfused_attention", "UnfusedDotProductAttention"),
        ("unfused_attention.scale_mask_softmax", "FusedScaleMaskSoftmax"),
        ("unfused_attention.attention_dropout", "Dropout"),
    ]


@pytest.mark.parametrize("kind", [kind for kind in PARAMETERS if kind != "DotProductAttention"])
def test_other_modules_have_no_submodules(kind: str) -> None:
    assert list(PARAMETERS[kind][0]().children()) == []


def test_absent_bias_is_an_empty_tensor() -> None:
    """Megatron and TE read the attribute whether or not there is a bias."""
    assert Linear(2, 3, bias=False, device="cpu").bias.shape == (0,)
    assert GroupedLinear(1, 2, 3, bias=False, device="cpu").bias0.shape == (0,)


@pytest.mark.parametrize(("parallel_mode", "dim"), [(None, 0), ("column", 0), ("row", 1)])
def test_linear_weight_says_how_it_is_partitioned(parallel_mode: str | None, dim: int) -> None:
    weight = Linear(2, 3, parallel_mode=parallel_mode, device="cpu").weight
    attributes = (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride)
    assert attributes == (True, dim, 1)


def test_grouped_weights_carry_no_partition() -> None:
    """TE marks them only in its single-parameter layout; Megatron marks them itself."""
    assert not hasattr(GroupedLinear(1, 2, 3, device="cpu").weight0, "partition_dim")


def test_init_method_runs_under_the_named_random_state() -> None:
    forks: list[str | None] = []

    class Tracker:
        def fork(self, name: str | None = None) -> torch.no_grad:
            forks.append(name)
            return torch.no_grad()

        def get_states(self) -> dict[str, torch.Tensor]:
            return {}

    module = Linear(
        2, 3, device="cpu", rng_tracker_name="experts", get_rng_state_tracker=Tracker,
        init_method=lambda weight: weight.fill_(0.5),
    )  # fmt: skip
    assert module.weight.unique().tolist() == [0.5]
    assert module.bias.unique().tolist() == [0]
    assert forks == ["experts"]


def test_meta_parameters_get_values_from_reset_parameters() -> None:
    module = LayerNormLinear(
        2, 3, device="meta", init_method=lambda weight: torch.nn.init.constant_(weight, 2.0)
    )
    assert all(parameter.is_meta for parameter in module.parameters())
    module.reset_parameters()
    values = {name: set(p.flatten().tolist()) for name, p in module.named_parameters()}
    assert values == {
        "layer_norm_weight": {1.0},
        "layer_norm_bias": {0.0},
        "weight": {2.0},
        "bias": {0.0},
    }


def test_parameters_live_on_the_host_whatever_device_is_asked_for() -> None:
    """Megatron passes `torch.cuda.current_device()`, an index."""
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0)):
        assert Linear(2, 3, device=device).weight.device == torch.device("cpu")
