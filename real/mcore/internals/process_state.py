"""Where Megatron keeps state once per process, for hosts that run several ranks in one."""

from __future__ import annotations

from typing import Final

PROCESS_GLOBALS: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.parallel_state": (),
    "megatron.core.pipeline_parallel.utils": ("_COMM_STREAM",),
    "megatron.core.tensor_parallel.random": (
        "IS_CHECKPOINTING",
        "_CUDA_RNG_STATE_TRACKER",
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
    ),
    "megatron.core.num_microbatches_calculator": ("_GLOBAL_NUM_MICROBATCHES_CALCULATOR",),
    "megatron.core.rerun_state_machine": ("_GLOBAL_RERUN_STATE_MACHINE",),
    "megatron.core.transformer.moe.moe_logging": ("_MOE_METRICS_TRACKER",),
    "megatron.core.transformer.moe.fused_a2a": ("_buffer", "_hybrid_ep_buffer"),
    "megatron.core.distributed.param_and_grad_buffer": ("dist_reduce_scatter_func",),
}
"""Module globals that Megatron keeps once per process; an empty tuple means every private one."""

PROCESS_CLASS_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": ("main_loss_backward_scale",),
    "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler": (
        "main_loss_backward_scale",
    ),
    "megatron.core.transformer.multi_token_prediction.MTPLossLoggingHelper": ("tracker",),
    "megatron.core.transformer.moe.shared_experts.SharedExpertMLP": ("stream",),
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": (
        "cuda_dtoh_stream",
    ),
}
"""Class attributes that Megatron assigns at run time and so shares within a process."""

SHARE_STORAGE_LOADER: Final = "megatron.core.tensor_parallel.random._get_share_storage"
"""Compiles and returns the function that gives a discarded activation its recomputed memory."""
