"""Which target of which Megatron a command is about, and how the header of a trace says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from real.targets.base import DEFAULT, check_target_name, find_target
from real.targets.tree import check_tree


@dataclass(frozen=True)
class Hosted:
    """A target and the Megatron that it is built of.

    Attributes:
        target: A name that `find_target` knows.
        tree: The folder that holds its `megatron`, before all others; None for the installed one.
    """

    target: str = DEFAULT
    tree: Path | None = None

    def check(self) -> None:
        """Refuses what can be refused before Megatron is imported.

        Raises:
            TargetError: There is no such target.
            ScenarioError: The folder holds no Megatron.
        """
        check_target_name(self.target)
        check_tree(self.tree)

    def identity(self) -> dict[str, Any]:
        """Returns what the header of a trace says beside the scenario. Megatron must be importable.

        The installed release with our hooks says nothing: its trace is the same anywhere.
        """
        from real.mcore.versions import imported_version

        if self == RELEASED:
            return {}
        bounds = find_target(self.target).bounds()
        return {
            "target": self.target,
            "megatron": imported_version(),
            **({} if self.tree is None else {"tree": str(self.tree)}),
            **({"bounds": bounds} if bounds else {}),
        }


RELEASED: Final = Hosted()
"""The released MFSDP v2 under our hooks."""
