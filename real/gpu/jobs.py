"""Builds the job of a variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from real.config import Scenario
from real.gpu.loopback import Seat, built_alone
from real.targets import DEFAULT, Target, find_target
from real.variants import target_of, vary

if TYPE_CHECKING:
    from real.mcore.jobs import Job


def make_job(
    scenario: Scenario, variant: str, under_test: str = DEFAULT, seat: Seat | None = None
) -> Job:
    """Builds the job of a variant; model parallel groups must be initialized.

    Args:
        scenario: What is varied.
        variant: A name of `real.variants.VARIANTS`.
        under_test: The target whose own variant holds; see `target_of`.
        seat: The rank that this process stands for, alone; None among peers.

    Raises:
        TargetError: The imported tree lacks what the variant's target needs.
    """
    name = target_of(variant, under_test)
    target = None if name is None else find_target(name)
    with built_alone(seat, target):
        return _build(vary(scenario, variant), target)


def _build(varied: Scenario, target: Target | None) -> Job:
    is_overlapped = varied.overlap_moe_expert_parallel_comm
    if target is None:
        from real.mcore.jobs import ReferenceJob

        return ReferenceJob(varied, is_overlapped=is_overlapped)
    # Ours alone can drive the plain schedule too; a target's plain schedule is its reference.
    is_driven = is_overlapped or varied.fine_grained_hooks
    return target.build(varied) if is_driven else target.reference(varied)
