"""What a rank trains, and what is watched while it does.

Nothing else in the session names a job: another thing to judge is another target (`real.targets`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real.config import Scenario, ScenarioError
from real.reference import Reference
from real.targets import DEFAULT, Hosted, TargetError, check_target_name, find_target

if TYPE_CHECKING:
    import torch

    from real.mcore.jobs import Job

StorageId = Callable[["torch.UntypedStorage"], int]
"""Returns the number that a rank's trace has for a storage."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a rank trains, and what is watched while it does.

    All of it is called with Megatron up; only `watching` and `title` are called outside a rank.

    Attributes:
        name: What a command line, and the orders to another process, call it.
        make_job: Builds a rank's job; model parallel groups are initialized.
        label: What progress calls it.
        tree: The folder that holds its `megatron`, before all others; None for the installed one.
        title: Returns what a headline calls it.
        identity: Returns what the header of a trace says beside the scenario.
        watching: Makes a context, once a process, around all ranks.
        describe: Records what a job that was just built consists of.
        adapt: Changes a scenario to what this subject can train.
    """

    name: str
    make_job: Callable[[Scenario], Job]
    label: str = "scenario"
    tree: Path | None = None
    title: Callable[[], str] = lambda: "no FSDP"
    identity: Callable[[], dict[str, Any]] = dict
    watching: Callable[[], AbstractContextManager[Any]] = nullcontext
    describe: Callable[[Any, StorageId], None] = lambda _job, _storage_id: None
    adapt: Callable[[Scenario], Scenario] = lambda scenario: scenario


def _of_target(name: str, tree: Path | None = None) -> Subject:
    def watching() -> AbstractContextManager[None]:
        from real.mcore.observe import recorded_nodes

        return recorded_nodes(find_target(name).points())

    return Subject(
        name=name,
        tree=tree,
        make_job=lambda scenario: find_target(name).build(scenario),
        title=lambda: find_target(name).title,
        identity=lambda: Hosted(name, tree).identity(),
        watching=watching,
        describe=lambda job, storage_id: find_target(name).describe(job, storage_id),
    )


MFSDP2: Final = _of_target(DEFAULT)
"""The released MFSDP v2 under our hooks."""


def find_subject(name: str = DEFAULT, tree: Path | None = None) -> Subject:
    """Returns a subject by the name of its target.

    Args:
        name: A name that `real.targets.find_target` knows.
        tree: The folder that holds its `megatron`; None for the installed one.

    Raises:
        ScenarioError: There is none of that name.
    """
    try:
        check_target_name(name)
    except TargetError as error:
        raise ScenarioError(str(error)) from None
    return MFSDP2 if name == DEFAULT and tree is None else _of_target(name, tree)


def reference_subject(reference: Reference, of: Subject = MFSDP2) -> Subject:
    """Returns what a scenario is compared with.

    Args:
        reference: Which one.
        of: What is compared; "plain" is the same under its plain schedule.
    """
    if reference is Reference.PLAIN:
        return Subject(
            name=reference,
            label="reference",
            tree=of.tree,
            make_job=lambda scenario: find_target(of.name).reference(scenario),
        )

    def make(scenario: Scenario) -> Job:
        from real.mcore.distopt import make_reference

        return make_reference(scenario, reference)

    return Subject(
        name=reference, label="reference", tree=of.tree, make_job=make, adapt=_without_hybrid
    )


def _without_hybrid(scenario: Scenario) -> Scenario:
    # Without FSDP a hybrid mesh has no meaning, and the groups of one would mislead DDP.
    return scenario.changed(num_distributed_optimizer_instances=1)
