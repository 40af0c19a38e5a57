"""What a rank trains, and what is watched while it does.

Nothing else in the session names a job: another thing to judge is another value here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from real.config import Scenario, ScenarioError
from real.reference import Reference

if TYPE_CHECKING:
    import torch

    from real.mcore.jobs import Job

StorageId = Callable[["torch.UntypedStorage"], int]
"""Returns the number that a rank's trace has for a storage."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a rank trains, and what is watched while it does.

    All of it is called with Megatron up; only `watching` is called outside a rank.

    Attributes:
        name: What a command line, and the orders to another process, call it.
        label: What progress calls it.
        make_job: Builds a rank's job; model parallel groups are initialized.
        watching: Makes a context, once a process, around all ranks.
        describe: Records what a job that was just built consists of.
        adapt: Changes a scenario to what this subject can train.
    """

    name: str
    label: str = "scenario"
    make_job: Callable[[Scenario], Job]
    watching: Callable[[], AbstractContextManager[Any]] = nullcontext
    describe: Callable[[Any, StorageId], None] = lambda _job, _storage_id: None
    adapt: Callable[[Scenario], Scenario] = lambda scenario: scenario


def _make_mfsdp2(scenario: Scenario) -> Job:
    from real.mcore.jobs import FsdpJob

    return FsdpJob(scenario)


def _watch_nodes() -> AbstractContextManager[None]:
    from real.mcore.observe import recorded_nodes

    return recorded_nodes()


def _describe_mfsdp2(job: Any, storage_id: StorageId) -> None:
    from real.mcore import watch_table

    watch_table.describe(job.model, storage_id)


MFSDP2: Final = Subject(
    name="mfsdp2", make_job=_make_mfsdp2, watching=_watch_nodes, describe=_describe_mfsdp2
)
"""The released MFSDP v2 under our hooks."""

_SUBJECTS: Final = {subject.name: subject for subject in (MFSDP2,)}


def find_subject(name: str) -> Subject:
    """Returns a subject by its name.

    Raises:
        ScenarioError: There is none of that name.
    """
    if name not in _SUBJECTS:
        raise ScenarioError(f"Expected a target among {', '.join(_SUBJECTS)}; got {name!r}.")
    return _SUBJECTS[name]


def reference_subject(reference: Reference) -> Subject:
    """Returns what a scenario is compared with."""

    def make(scenario: Scenario) -> Job:
        from real.mcore.distopt import make_reference

        return make_reference(scenario, reference)

    return Subject(name=reference, label="reference", make_job=make, adapt=_without_hybrid)


def _without_hybrid(scenario: Scenario) -> Scenario:
    # Without FSDP a hybrid mesh has no meaning, and the groups of one would mislead DDP.
    return scenario.changed(num_distributed_optimizer_instances=1)
