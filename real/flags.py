"""Command-line flags for every scenario key, for the commands of both modes."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, Final, NoReturn

from real.config import Scenario, flag

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
