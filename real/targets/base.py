"""What is under test, behind one protocol, and the table of all targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from real.config import Scenario
from real.targets.errors import TargetError as TargetError  # its public place
from real.targets.files import check_file_name, is_file_name, load_target

if TYPE_CHECKING:
    from real.mcore.jobs import Job
    from real.targets.records import StorageId
    from real.watch.points import Point


class Target(Protocol):
    """A way to train a scenario's model under FSDP, and how to watch it."""

    @property
    def name(self) -> str:
        """What `--target` calls it."""
        ...

    @property
    def title(self) -> str:
        """What a headline calls it."""
        ...

    def missing(self) -> list[str]:
        """Returns the names that the imported tree lacks; empty where the target fits."""
        ...

    def build(self, scenario: Scenario) -> Job:
        """Builds the job on this rank. Model parallel groups must be initialized."""
        ...

    def reference(self, scenario: Scenario) -> Job:
        """Builds the same target under its plain schedule."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Makes a context to build in where a rank's peers are not there, for what they would say.

        Nothing else may be other than among peers: no call, no record.
        """
        ...

    def bounds(self) -> dict[str, int]:
        """Returns what the target promises, as {"unsharded": 5} units at once; or nothing."""
        ...

    def points(self) -> Sequence[Point]:
        """Returns the methods to watch, which serve every rank of the process."""
        ...

    def describe(self, job: Any, storage_id: StorageId) -> None:
        """Records units, parameters, buffer names and stream roles of a job, once it is built.

        Args:
            job: What `build` returned.
            storage_id: Returns the number that the trace has for a storage.
        """
        ...


def _mfsdp2(variant: str) -> Target:
    from real.targets.mfsdp2 import Mfsdp2

    return Mfsdp2(_no_variant("mfsdp2", variant))


def _mfsdp1(variant: str) -> Target:
    from real.targets.mfsdp1 import Mfsdp1

    return Mfsdp1(variant)


def _native(variant: str) -> Target:
    from real.targets.native import Native

    return Native(variant)


DEFAULT: Final = "mfsdp2"

_TARGETS: Final[dict[str, Callable[[str], Target]]] = {
    "mfsdp2": _mfsdp2,
    "mfsdp1": _mfsdp1,
    "native": _native,
}


def find_target(name: str) -> Target:
    """Returns a target by its name, as "mfsdp2" or, with a variant, "mfsdp1:optim_grads".

    A variant of mfsdp1 is Megatron's sharding strategy; of native, flags of Megatron's config.
    A name like "path/to/adapter.py:ClassName" is a class in a file, which is run.

    Megatron must be importable; it is imported from wherever it is first on the path.

    Raises:
        TargetError: There is no such target, or the imported tree lacks names that it needs.
    """
    check_target_name(name)
    target = _load(name)
    missing = target.missing()
    if missing:
        raise TargetError(
            f"Expected a Megatron tree that target {name!r} fits, got one without "
            f"{', '.join(missing)}."
        )
    return target


def check_target_name(name: str) -> None:
    """Refuses a name that no target has, without importing Megatron or running a file.

    Raises:
        TargetError: There is no such target, or no such file.
    """
    if is_file_name(name):
        check_file_name(name)
    elif name.partition(":")[0] not in _TARGETS:
        raise TargetError(f"Expected a target among {', '.join(_TARGETS)}; got {name!r}.")


def _load(name: str) -> Target:
    if is_file_name(name):
        return load_target(name, Target)
    kind, _, variant = name.partition(":")
    return _TARGETS[kind](variant)


def _no_variant(kind: str, variant: str) -> str:
    if variant:
        raise TargetError(f"Expected no variant of target {kind!r}, got {variant!r}.")
    return kind
