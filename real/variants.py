"""The variants of a scenario that are timed against each other."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from real.config import Scenario
from real.targets import DEFAULT

_PLAIN: Final = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
_COMBINED: Final = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": False}
_DELAYED: Final = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


class Variant(NamedTuple):
    """One way to train a scenario.

    Attributes:
        target: Which target trains it; None for the job without FSDP.
        changes: What is other than in the scenario.
    """

    target: str | None
    changes: dict[str, Any]


VARIANTS: Final = {
    "no_fsdp_plain": Variant(None, _PLAIN),
    "no_fsdp_combined": Variant(None, _COMBINED),
    "mfsdp_plain": Variant("mfsdp2", _PLAIN),
    "mfsdp_plain_fine": Variant("mfsdp2", {**_PLAIN, "fine_grained_hooks": True}),
    "mfsdp_combined": Variant("mfsdp2", _COMBINED),
    "mfsdp_combined_dw": Variant("mfsdp2", _DELAYED),
    "prefetch_none": Variant("mfsdp2", {"prefetch": "none"}),
    "prefetch_forward": Variant("mfsdp2", {"prefetch": "forward"}),
    "prefetch_both": Variant("mfsdp2", {"prefetch": "both"}),
    "mfsdp1_plain": Variant("mfsdp1", _PLAIN),
    "mfsdp1_combined": Variant("mfsdp1", _COMBINED),
    "native_plain": Variant("native", _PLAIN),
    "native_combined": Variant("native", _COMBINED),
}
"""All variants by name."""

MAIN_VARIANTS: Final = (
    "no_fsdp_plain",
    "no_fsdp_combined",
    "mfsdp_plain",
    "mfsdp_combined",
    "mfsdp_combined_dw",
)
"""Plain and combined schedule, with and without MFSDP v2, and delayed weight gradients."""


def variants_of(target: str) -> tuple[str, ...]:
    """Returns what is timed of a target when nobody says what: its two schedules.

    Of the default one all main variants, which are compared with training without FSDP too.
    """
    if target == DEFAULT:
        return MAIN_VARIANTS
    kind = target.partition(":")[0]
    return (f"{kind}_plain", f"{kind}_combined")


def target_of(variant: str, under_test: str = DEFAULT) -> str | None:
    """Returns the full name of the target that trains a variant; None without FSDP.

    Args:
        variant: Its name.
        under_test: A target whose own variant, as "mfsdp1:optim_grads", holds for all of its kind.
    """
    kind = VARIANTS[variant].target
    return under_test if kind == under_test.partition(":")[0] else kind


def vary(scenario: Scenario, variant: str) -> Scenario:
    """Returns the scenario of a variant."""
    return scenario.changed(**VARIANTS[variant].changes)


def is_reference(variant: str) -> bool:
    """Whether a variant runs the job without FSDP."""
    return VARIANTS[variant].target is None


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
