"""The variants of a scenario that are timed against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from real.config import Scenario

if TYPE_CHECKING:
    from real.mcore.jobs import Job

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


def make_job(scenario: Scenario, variant: str) -> Job:
    """Builds the job of a variant; model parallel groups must be initialized."""
    from real.mcore.jobs import FsdpJob, ReferenceJob

    varied = vary(scenario, variant)
    if is_reference(variant):
        return ReferenceJob(varied, is_overlapped=varied.overlap_moe_expert_parallel_comm)
    return FsdpJob(varied)
