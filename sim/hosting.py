"""Which Megatron a run imports, and which of its ways to train is under test."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from real.config import ScenarioError
from real.targets import DEFAULT, TargetError, check_target_name


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """What a run is of.

    Attributes:
        target: A name that `real.targets.find_target` knows.
        tree: The folder that holds the tree's `megatron`; None for the installed one.
    """

    target: str = DEFAULT
    tree: Path | None = None

    def put_first(self) -> None:
        """Makes the tree the one that is imported, in this process and in what it starts.

        Raises:
            ScenarioError: The folder holds no Megatron, or another one is imported already.
        """
        if self.tree is None:
            return
        if not (self.tree / "megatron" / "core" / "__init__.py").is_file():
            raise ScenarioError(f"Expected a folder that holds megatron/core, got {self.tree}.")
        imported = sys.modules.get("megatron.core")
        folder = str(self.tree.resolve())
        if imported is not None and not str(imported.__file__).startswith(f"{folder}/"):
            raise ScenarioError(
                f"Expected Megatron not to be imported yet, got it from {imported.__file__}."
            )
        sys.path.insert(0, folder)

    def identity(self) -> dict[str, Any]:
        """Returns what the header of a trace says beside the scenario; Megatron is imported.

        A run of the installed release with our hooks says nothing: its trace is the same anywhere.
        """
        from real.mcore.versions import imported_version
        from real.targets import find_target

        if self == RELEASE:
            return {}
        tree = {} if self.tree is None else {"tree": str(self.tree)}
        bounds = find_target(self.target).bounds()
        return {
            "target": self.target,
            "megatron": imported_version(),
            **tree,
            **({"bounds": bounds} if bounds else {}),
        }


RELEASE: Final = Hosted()
"""The installed release with our hooks."""


def add_hosting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is under test."""
    parser.add_argument(
        "--target",
        default=DEFAULT,
        metavar="NAME",
        help="what is under test: mfsdp2, the released MFSDP v2 with our hooks (default); mfsdp1, "
        "or mfsdp1:optim_grads, the released MFSDP v1 with Megatron's own hooks; native, a tree "
        "that joins MFSDP v2 and the combined schedule itself",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="PATH",
        help="import the Megatron tree in this folder instead of the installed release",
    )


def hosted_of(arguments: argparse.Namespace) -> Hosted:
    """Returns what the flags say, not imported yet.

    Raises:
        ScenarioError: There is no such target, or the folder holds no Megatron.
    """
    try:
        check_target_name(arguments.target)
    except TargetError as error:
        raise ScenarioError(str(error)) from None
    hosted = Hosted(target=arguments.target, tree=arguments.megatron)
    hosted.put_first()
    return hosted


def refuse_unfit(hosted: Hosted) -> str | None:
    """Imports Megatron and returns in one line why the target cannot be built, or None."""
    from real.mcore.versions import UnsupportedVersion, check_megatron_version
    from real.targets import find_target
    from sim.megatron import megatron_on_fake_cuda

    try:
        if hosted.tree is None:
            check_megatron_version()
        if hosted == RELEASE:
            return None
        with megatron_on_fake_cuda():
            find_target(hosted.target)
    except (UnsupportedVersion, TargetError) as error:
        return str(error)
    return None
