"""Command-line flags of the commands of both modes: every scenario key, and what is under test."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn

from real.config import Scenario, flag
from real.targets import DEFAULT

BAD_INPUT: Final = 2
"""Exit status for input that cannot be run."""

# Short names beside Megatron's own flags.
_ALIASES: Final = {"world_size": ["--ranks"], "train_iters": ["--steps"]}


class OneLineParser(argparse.ArgumentParser):
    """Prints one line for a bad argument instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for every scenario key, with Megatron's spelling."""
    group = parser.add_argument_group("scenario keys (override the file)")
    for spec in fields(Scenario):
        names = [f"--{flag(spec.name)}", *_ALIASES.get(spec.name, [])]
        options: dict[str, Any] = {"dest": spec.name, "help": spec.metadata["help"]}
        if spec.type == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = {"int": int, "float": float, "str": str}[str(spec.type)]
            options["choices"] = spec.metadata["choices"] or None
            if not spec.metadata["choices"]:
                options["metavar"] = {"int": "N", "float": "X"}.get(str(spec.type), "NAME")
        group.add_argument(*names, **options)


def scenario_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keys given as flags; None for the others."""
    return {spec.name: getattr(arguments, spec.name) for spec in fields(Scenario)}


def add_hosting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is under test."""
    parser.add_argument(
        "--target",
        default=DEFAULT,
        metavar="NAME",
        help="what is under test: mfsdp2, the released MFSDP v2 with our hooks (default); mfsdp1, "
        "or mfsdp1:optim_grads, the released MFSDP v1 with Megatron's own hooks; native, a tree "
        "that joins MFSDP v2 and the combined schedule itself; or FILE.py:CLASS, an adapter of "
        "your own (docs/your-tree.md)",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="PATH",
        help="import the Megatron tree in this folder instead of the installed release",
    )
