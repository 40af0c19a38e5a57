"""The released MFSDP v2 with our hooks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from real.config import Scenario
from real.mcore import watch_table
from real.mcore.jobs import FsdpJob
from real.mcore.versions import missing_names
from real.targets.records import StorageId
from real.watch.points import Point


class Mfsdp2:
    """MFSDP v2 under our hooks.

    Args:
        name: What `--target` calls it.
    """

    def __init__(self, name: str = "mfsdp2") -> None:
        self.name = name

    @property
    def title(self) -> str:
        """What a headline calls it."""
        return "MFSDP v2"

    def missing(self) -> list[str]:
        """Returns the names that the imported tree lacks."""
        return missing_names()

    def build(self, scenario: Scenario) -> FsdpJob:
        """Builds the model under the scenario's schedule."""
        return FsdpJob(scenario)

    def reference(self, scenario: Scenario) -> FsdpJob:
        """Builds the model under the plain schedule and MFSDP's own hooks."""
        return FsdpJob(
            scenario.changed(
                overlap_moe_expert_parallel_comm=False,
                delay_wgrad_compute=False,
                fine_grained_hooks=False,
            )
        )

    def alone(self) -> AbstractContextManager[None]:
        """Makes a context that does nothing: no answer of a peer is looked at."""
        return nullcontext()

    def bounds(self) -> dict[str, int]:
        """Returns nothing: the bound follows from the scenario."""
        return {}

    def points(self) -> Sequence[Point]:
        """Returns the methods to watch."""
        return watch_table.points()

    def describe(self, job: Any, storage_id: StorageId) -> None:
        """Records what the job has."""
        watch_table.describe(job.model, storage_id)
