"""What a simulated and a real run of one scenario may differ in, each with the reason.

Nothing else is left out of the canonical form. What is left out is counted and reported with the
result, so that no difference disappears unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """One permitted difference.

    Attributes:
        name: What may differ.
        reason: Why no run can promise it.
    """

    name: str
    reason: str


ROUTED: Final = Allowance(
    name="bytes of an all_to_all",
    reason="The router decides how many tokens go where; first weights come from another random "
    "generator on a GPU.",
)
ACTIVATION: Final = Allowance(
    name="bytes of an activation's storage",
    reason="Tokens per expert are data, and kernels on a GPU may pad. The buffers of units, which "
    "live on the all-gather stream, are compared.",
)
RANGES: Final = Allowance(
    name="profiler ranges that are not MFSDP's",
    reason="Libraries open ranges of their own when a profiler or a flag asks for it.",
)
NUMBERS: Final = Allowance(
    name="records that give numbers (stream, group)",
    reason="A GPU's streams and groups are numbered when they are first used, and there by when "
    "they are made. Streams are compared by role, groups by their ranks.",
)
KERNELS: Final = Allowance(
    name="kernels and their storages (kernel, allocate, free, name)",
    reason="They are recorded on request, and Transformer Engine's own kernels on no GPU.",
)
VERSIONS: Final = Allowance(
    name="version counters of full weights (weight_version)",
    reason="How often a tensor was written before the first gather depends on how it was made. "
    "That a gather does not move them is a check's affair.",
)

ALLOWANCES: Final = (ROUTED, ACTIVATION, RANGES, NUMBERS, KERNELS, VERSIONS)
"""All of them."""

MFSDP_RANGE: Final = "MFSDP "
"""How the ranges of units begin."""
