"""Which names the stand-in's modules hold.

[Note: missing names] A name that the real 2.17.1 has and the tables below lack raises
AttributeError when it is looked up, and so ImportError in `from ... import`. Megatron catches the
latter and goes on without the feature. Names that 2.17.1 itself no longer has, such as
`attention._SplitAlongDim` and `module.base.get_workspace`, are left out on purpose: Megatron takes
its other branch.
"""

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from sim.te import (
    attention,
    base,
    gemm,
    grouped_linear,
    layernorm_linear,
    linear,
    norm,
    optimizers,
    quantization,
    rng,
    rope,
)
from sim.te.refusal import refuse_if, refusing_class, refusing_function


def get_cpu_offload_context(
    enabled: bool = False, *_args: object, **_kwargs: object
) -> tuple[object, object]:
    """Returns (context, synchronisation function) that do nothing; every Megatron block asks.

    Raises:
        NotImplementedError: `enabled`.
    """
    refuse_if(enabled, "activation offloading to the CPU")
    return nullcontext(), lambda tensor: tensor


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """Returns no states: none belong to a CUDA graph."""
    return {}


def _refused(feature: str, *names: str) -> dict[str, object]:
    return {name: refusing_function(name, feature) for name in names}


def _refused_classes(feature: str, *names: str) -> dict[str, object]:
    return {name: refusing_class(name, feature) for name in names}


_LAYERS: dict[str, object] = {
    "Linear": linear.Linear,
    "LayerNormLinear": layernorm_linear.LayerNormLinear,
    "GroupedLinear": grouped_linear.GroupedLinear,
    "LayerNorm": norm.LayerNorm,
    "RMSNorm": norm.RMSNorm,
    **_refused_classes("LayerNormMLP", "LayerNormMLP"),
    **_refused_classes("FP8 padding", "Fp8Padding", "Fp8Unpadding"),
}
_ATTENTION: dict[str, object] = {
    "DotProductAttention": attention.DotProductAttention,
    **_refused_classes("MultiheadAttention", "MultiheadAttention"),
    **_refused_classes("attention with a key-value cache", "InferenceParams"),
}
_AUTOCAST: dict[str, object] = {
    "fp8_autocast": quantization.fp8_autocast,
    "fp8_model_init": quantization.fp8_model_init,
    "autocast": quantization.autocast,
    "quantized_model_init": quantization.quantized_model_init,
}
_DISTRIBUTED: dict[str, object] = {
    "CudaRNGStatesTracker": rng.CudaRNGStatesTracker,
    "get_all_rng_states": get_all_rng_states,
    "is_fp8_activation_recompute_enabled": quantization.is_fp8_activation_recompute_enabled,
    "activation_recompute_forward": quantization.activation_recompute_forward,
    "in_fp8_activation_recompute_phase": quantization.in_fp8_activation_recompute_phase,
    **_refused(
        "activation checkpointing by Transformer Engine",
        "checkpoint",
    ),
    **_refused("sequence parallelism", "gather_along_first_dim", "reduce_scatter_along_first_dim"),
}
_PERMUTATION = _refused(
    "fused token permutation",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_permute_and_pad_with_probs",
    "moe_unpermute",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
)
_CROSS_ENTROPY = _refused("fused cross entropy", "parallel_cross_entropy")
_OFFLOAD: dict[str, object] = {
    "get_cpu_offload_context": get_cpu_offload_context,
    **_refused("activation offloading to the CPU", "mark_activation_offload", "mark_not_offload"),
}
_GRAPHED = _refused("CUDA graphs", "make_graphed_callables")

# Dotted name below `transformer_engine` -> names; parents appear before their children.
NAMES: Mapping[str, Mapping[str, object]] = {
    "common": {},
    "common.recipe": {"Format": quantization.Format, **quantization.RECIPES},
    "pytorch": {
        **_LAYERS,
        **_ATTENTION,
        **_AUTOCAST,
        **_PERMUTATION,
        **_CROSS_ENTROPY,
        **_GRAPHED,
        **_refused_classes("TransformerLayer", "TransformerLayer"),
        "CudaRNGStatesTracker": rng.CudaRNGStatesTracker,
        "checkpoint": _DISTRIBUTED["checkpoint"],
        "get_cpu_offload_context": get_cpu_offload_context,
    },
    "pytorch.module": _LAYERS,
    "pytorch.module.base": {
        "TransformerEngineBaseModule": base.TransformerEngineBaseModule,
        "get_dummy_wgrad": base.get_dummy_wgrad,
    },
    "pytorch.module.linear": {"Linear": linear.Linear},
    "pytorch.module.layernorm_linear": {"LayerNormLinear": layernorm_linear.LayerNormLinear},
    "pytorch.module.grouped_linear": {"GroupedLinear": grouped_linear.GroupedLinear},
    "pytorch.attention": _ATTENTION,
    "pytorch.attention.rope": {
        "apply_rotary_pos_emb": rope.apply_rotary_pos_emb,
        **_refused(
            "rotary embedding fused over query, key and value", "apply_fused_qkv_rotary_pos_emb"
        ),
    },
    "pytorch.cpp_extensions": {
        "general_gemm": gemm.general_gemm,
        "general_grouped_gemm": gemm.general_grouped_gemm,
    },
    "pytorch.cpu_offload": _OFFLOAD,
    "pytorch.cpu_offload_v1": _OFFLOAD,
    "pytorch.cross_entropy": _CROSS_ENTROPY,
    "pytorch.distributed": _DISTRIBUTED,
    "pytorch.float8_tensor": {"Float8Tensor": quantization.TENSOR_CLASSES["Float8Tensor"]},
    "pytorch.fp8": {"FP8GlobalStateManager": quantization.FP8GlobalStateManager, **_AUTOCAST},
    "pytorch.graph": {
        **_GRAPHED,
        **_refused(
            "CUDA graphs",
            "save_fp8_tensors",
            "restore_fp8_tensors",
            "set_capture_start",
            "set_capture_end",
        ),
    },
    "pytorch.ops": {
        "BasicOperation": norm.BasicOperation,
        **_refused_classes(
            "the fusible operations API",
            "Sequential",
            "FusibleOperation",
            "MakeExtraOutput",
            "LayerNorm",
            "RMSNorm",
            "BasicLinear",
            "Bias",
            "AllReduce",
            "ReduceScatter",
            "GroupedLinear",
            "GELU",
            "GEGLU",
            "SiLU",
            "SwiGLU",
            "ReLU",
            "ReGLU",
            "ScaledSwiGLU",
            "ScaledClampedQGeGLU",
        ),
    },
    "pytorch.optimizers": {
        "FusedAdam": optimizers.FusedAdam,
        "MultiTensorApply": optimizers.MultiTensorApply,
        "multi_tensor_applier": optimizers.multi_tensor_applier,
        "multi_tensor_l2norm": optimizers.multi_tensor_l2norm,
        "multi_tensor_scale": optimizers.multi_tensor_scale,
        "multi_tensor_scale_tensor": optimizers.multi_tensor_scale_tensor,
        **_refused_classes("FusedSGD", "FusedSGD"),
    },
    "pytorch.permutation": _PERMUTATION,
    "pytorch.quantization": {
        "FP8GlobalStateManager": quantization.FP8GlobalStateManager,
        **_AUTOCAST,
    },
    "pytorch.router": _refused(
        "fused routing",
        "fused_topk_with_score_function",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
    ),
    "pytorch.tensor": quantization.TENSOR_CLASSES,
    "pytorch.tensor.float8_tensor": {"Float8Tensor": quantization.TENSOR_CLASSES["Float8Tensor"]},
    "pytorch.tensor.float8_blockwise_tensor": {
        "Float8BlockwiseQTensor": quantization.TENSOR_CLASSES["Float8BlockwiseQTensor"]
    },
    "pytorch.tensor.grouped_tensor": {
        "GroupedTensor": quantization.TENSOR_CLASSES["GroupedTensor"]
    },
    "pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": quantization.TENSOR_CLASSES["MXFP8Tensor"]},
    "pytorch.tensor.nvfp4_tensor": {"NVFP4Tensor": quantization.TENSOR_CLASSES["NVFP4Tensor"]},
    "pytorch.tensor.utils": _refused(
        "quantized parameters",
        "cast_master_weights_to_fp8",
        "post_all_gather_processing",
        "quantize_master_weights",
        "replace_raw_data",
    ),
    "pytorch.utils": _refused("CUDA graphs", "make_weak_ref"),
}
