"""Builds the job of a variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from real.config import Scenario
from real.variants import is_reference, vary

if TYPE_CHECKING:
    from real.mcore.jobs import Job


def make_job(scenario: Scenario, variant: str) -> Job:
    """Builds the job of a variant; model parallel groups must be initialized."""
    from real.mcore.jobs import FsdpJob, ReferenceJob

    varied = vary(scenario, variant)
    if is_reference(variant):
        return ReferenceJob(varied, is_overlapped=varied.overlap_moe_expert_parallel_comm)
    return FsdpJob(varied)
