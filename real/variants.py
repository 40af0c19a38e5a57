"""The variants of a scenario that are timed against each other."""

from __future__ import annotations

from typing import Final

from real.config import Scenario

VARIANTS: Final[dict[str, dict[str, object]]] = {
    "no_fsdp_plain": {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    "no_fsdp_combined": {
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": False,
    },
    "mfsdp_plain": {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    "mfsdp_plain_fine": {
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "fine_grained_hooks": True,
    },
    "mfsdp_combined": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": False},
    "mfsdp_combined_dw": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    "prefetch_none": {"prefetch": "none"},
    "prefetch_forward": {"prefetch": "forward"},
    "prefetch_both": {"prefetch": "both"},
}
"""What each variant changes in a scenario; "no_fsdp" in front means the job without FSDP."""

MAIN_VARIANTS: Final = (
    "no_fsdp_plain",
    "no_fsdp_combined",
    "mfsdp_plain",
    "mfsdp_combined",
    "mfsdp_combined_dw",
)
"""Plain and combined schedule, with and without MFSDP v2, and delayed weight gradients."""


def vary(scenario: Scenario, variant: str) -> Scenario:
    """Returns the scenario of a variant."""
    return scenario.changed(**VARIANTS[variant])


def is_reference(variant: str) -> bool:
    """Whether a variant runs the job without FSDP."""
    return variant.startswith("no_fsdp")


def part_name(part: str, *, is_overlapped: bool, is_sharded: bool) -> str:
    """Returns the name under which a part of a step is known to the timing model.

    The combined schedule runs the loss's backward alone where the plain one runs that of the whole
    model, and a layer or model under MFSDP's own hooks takes longer than one without.

    Args:
        part: "layer forward" or "model backward"; others stay as they are.
        is_overlapped: Whether the combined schedule runs.
        is_sharded: Whether the model is under MFSDP.
    """
    if part not in ("layer forward", "model backward"):
        return part
    if is_overlapped:
        return "loss_func backward" if part == "model backward" else part
    return f"sharded {part}" if is_sharded else part
