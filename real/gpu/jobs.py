"""Builds the job of a variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from real.config import Scenario
from real.targets import DEFAULT, find_target
from real.variants import target_of, vary

if TYPE_CHECKING:
    from real.mcore.jobs import Job


def make_job(scenario: Scenario, variant: str, under_test: str = DEFAULT) -> Job:
    """Builds the job of a variant; model parallel groups must be initialized.

    Args:
        scenario: What is varied.
        variant: A name of `real.variants.VARIANTS`.
        under_test: The target whose own variant holds; see `target_of`.

    Raises:
        TargetError: The imported tree lacks what the variant's target needs.
    """
    varied = vary(scenario, variant)
    is_overlapped = varied.overlap_moe_expert_parallel_comm
    name = target_of(variant, under_test)
    if name is None:
        from real.mcore.jobs import ReferenceJob

        return ReferenceJob(varied, is_overlapped=is_overlapped)
    target = find_target(name)
    # Ours alone can drive the plain schedule too; a target's plain schedule is its reference.
    is_driven = is_overlapped or varied.fine_grained_hooks
    return target.build(varied) if is_driven else target.reference(varied)
