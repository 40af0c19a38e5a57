"""Builds the scenario's model: Megatron's own GPT MoE model."""

from __future__ import annotations

import fnmatch
import warnings
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from real.config import Scenario, split_list


def initialize_parallel(scenario: Scenario) -> None:
    """Starts Megatron's process groups and random states on this rank.

    torch.distributed must be initialized with `scenario.world_size` ranks.
    """
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=scenario.expert_model_parallel_size,
        num_distributed_optimizer_instances=scenario.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )
    seed_all(scenario)


def seed_all(scenario: Scenario) -> None:
    """Sets Megatron's random states: equal on all ranks for dense weights, by rank for experts."""
    torch.manual_seed(scenario.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(scenario.seed, force_reset_rng=True)


def make_config(scenario: Scenario, *, is_overlapped: bool) -> TransformerConfig:
    """Returns Megatron's config of a scenario.

    Args:
        scenario: The run.
        is_overlapped: Whether the combined schedule runs; False for the plain one.
    """
    return TransformerConfig(
        num_layers=scenario.num_layers,
        hidden_size=scenario.hidden_size,
        ffn_hidden_size=scenario.ffn_hidden_size,
        num_attention_heads=scenario.num_attention_heads,
        num_moe_experts=scenario.num_experts,
        moe_ffn_hidden_size=scenario.moe_ffn_hidden_size,
        moe_router_topk=scenario.moe_router_topk,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=scenario.transformer_impl == "transformer_engine",
        expert_model_parallel_size=scenario.expert_model_parallel_size,
        overlap_moe_expert_parallel_comm=is_overlapped,
        delay_wgrad_compute=is_overlapped and scenario.delay_wgrad_compute,
        moe_layer_freq=scenario.moe_layers,
        moe_shared_expert_intermediate_size=scenario.moe_shared_expert_intermediate_size or None,
        mtp_num_layers=scenario.mtp_num_layers or None,
        **_recompute(scenario),
        attention_backend=AttnBackend[scenario.attention_backend],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # Fused kernels exist for GPUs only; the unfused ones run in both modes.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _recompute(scenario: Scenario) -> dict[str, Any]:
    if scenario.recompute_granularity == "selective":
        modules = split_list(scenario.recompute_modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    if scenario.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {}


def build_model(config: TransformerConfig, scenario: Scenario) -> Any:
    """Returns Megatron's GPT or hybrid model in bf16, on this rank's device."""
    build = _build_hybrid if scenario.hybrid_layer_pattern else _build_gpt
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = build(config, scenario)
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in scenario.freeze_patterns):
            parameter.requires_grad_(False)
    return model.cuda().bfloat16()


def _build_gpt(config: TransformerConfig, scenario: Scenario) -> Any:
    uses_te = scenario.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=uses_te)
    mtp_spec = None
    if scenario.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=uses_te)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=scenario.vocab_size,
        max_sequence_length=scenario.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not scenario.untie_embeddings_and_output_weights,
        mtp_block_spec=mtp_spec,
    )


def _build_hybrid(config: TransformerConfig, scenario: Scenario) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=scenario.vocab_size,
        max_sequence_length=scenario.seq_length,
        hybrid_layer_pattern=scenario.hybrid_layer_pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not scenario.untie_embeddings_and_output_weights,
    )
