"""What MFSDP v2 under the combined schedule cannot do, refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import nn


class Limit(NamedTuple):
    """One thing that is not supported.

    Attributes:
        option: Megatron's name of the option.
        is_broken: Whether a config asks for it.
        expected: What the option has to be.
        reason: Why.
    """

    option: str
    is_broken: Callable[[Any], bool]
    expected: str
    reason: str


LIMITS: Final = (
    Limit(
        "tensor_model_parallel_size",
        lambda c: c.tensor_model_parallel_size > 1,
        "1",
        "MFSDP v2 shards whole parameters over data-parallel axes only.",
    ),
    Limit(
        "pipeline_model_parallel_size",
        lambda c: c.pipeline_model_parallel_size > 1,
        "1",
        "Each stage would need the fork of the all-gather stream that the root's first use makes.",
    ),
    Limit(
        "virtual_pipeline_model_parallel_size",
        lambda c: (c.virtual_pipeline_model_parallel_size or 1) > 1,
        "None",
        "Chunks would share one flag for the last microbatch, which is last at different times.",
    ),
    Limit(
        "context_parallel_size",
        lambda c: c.context_parallel_size > 1,
        "1",
        "Gradients of context-parallel ranks are not part of the units' meshes.",
    ),
    Limit(
        "fp8",
        lambda c: bool(c.fp8),
        "None",
        "Quantized weights have orientations that a plain gather does not know.",
    ),
    Limit(
        "fp4",
        lambda c: bool(getattr(c, "fp4", None)),
        "None",
        "Quantized weights have orientations that a plain gather does not know.",
    ),
    Limit(
        "gradient_accumulation_fusion",
        lambda c: bool(c.gradient_accumulation_fusion),
        "False",
        "It writes main gradients that a sharded parameter does not have.",
    ),
    Limit(
        "cuda_graph_impl",
        lambda c: getattr(c, "cuda_graph_impl", "none") not in ("none", None),
        "none",
        "A replayed graph calls no module hook, so nothing would gather.",
    ),
    Limit(
        "calculate_per_token_loss",
        lambda c: bool(c.calculate_per_token_loss),
        "False",
        "MFSDP v2 averages over data-parallel ranks; a per-token loss needs sums.",
    ),
    Limit(
        "recompute_granularity",
        lambda c: c.overlap_moe_expert_parallel_comm and c.recompute_granularity == "full",
        "None or selective",
        "A schedule node is smaller than a layer, so a whole layer cannot be recomputed in one.",
    ),
    Limit(
        "delay_wgrad_compute",
        lambda c: c.delay_wgrad_compute and not c.overlap_moe_expert_parallel_comm,
        "False without overlap_moe_expert_parallel_comm",
        "Only the combined schedule calls backward_dw.",
    ),
    Limit(
        "moe_shared_expert_overlap",
        lambda c: bool(c.moe_shared_expert_overlap),
        "False",
        "The shared expert would run on a stream of its own, inside another node.",
    ),
    Limit(
        "mtp_num_layers",
        lambda c: (c.mtp_num_layers or 0) > 1,
        "None or 1",
        "The combined schedule handles one prediction layer.",
    ),
)
"""Every limit; the table in docs/contract.md says the same for readers."""


def validate(config: Any, model: nn.Module) -> None:
    """Checks that a model can be sharded and scheduled.

    Args:
        config: Megatron's transformer config.
        model: The model, not sharded yet.

    Raises:
        ValueError: An option is beyond the limits, or the model has not the structure that the
            schedule drives. Nothing has been changed.
    """
    for limit in LIMITS:
        if limit.is_broken(config):
            raise ValueError(
                f"Expected {limit.option} to be {limit.expected}, got "
                f"{getattr(config, limit.option)!r}. {limit.reason}"
            )
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if layers is None or len(layers) == 0:
        raise ValueError(f"Expected a model with decoder layers, got {type(model).__name__}.")
    if config.overlap_moe_expert_parallel_comm:
        _check_trainable(model)
        _check_last_layer(layers)


def _check_last_layer(layers: Any) -> None:
    """The schedule applies the decoder's final norm inside the combine node of the last layer."""
    if not getattr(layers[-1], "is_moe_layer", True):
        raise ValueError(
            "Expected the last decoder layer to be MoE with overlap_moe_expert_parallel_comm, got "
            "a dense one. It has no combine node, and the schedule applies the final norm there."
        )


def _check_trainable(model: nn.Module) -> None:
    """The schedule makes its backward and weight-gradient calls whatever is frozen."""
    embedding = getattr(model, "embedding", None)
    if embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
        raise ValueError(
            "Expected the embedding to be trainable with overlap_moe_expert_parallel_comm, got it "
            "frozen. Its node runs backward, and autograd refuses an output without a gradient."
        )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "skip_backward_post_hook", False) and not parameter.requires_grad:
            raise ValueError(
                f"Expected {name} to be trainable with delay_wgrad_compute, got it frozen. "
                "Transformer Engine's backward_dw expects a stored gradient of every weight."
            )
