"""One module a command: `add` describes its flags, `run` does the work.

Modules import what is heavy inside `run`, so that bad input is answered before torch loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final, Protocol

from sim.commands import (
    accuracy,
    bench,
    cases,
    check,
    diff,
    fit,
    fuzz,
    host,
    mutants,
    run,
    time,
    whatif,
)

Subparsers = Any  # argparse gives the class no public name


class Command(Protocol):
    """A module of this package."""

    def add(self, commands: Subparsers) -> None:
        """Adds the command's own parser."""
        ...

    def run(self, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
        """Runs the command and returns its exit status.

        Args:
            arguments: What the parser made of the command line.
            argv: The words of the command line, for replay commands.
        """
        ...


COMMANDS: Final[dict[str, Command]] = {
    "run": run,
    "check": check,
    "diff": diff,
    "fuzz": fuzz,
    "cases": cases,
    "mutants": mutants,
    "time": time,
    "whatif": whatif,
    "host": host,
    "accuracy": accuracy,
    "bench": bench,
    "fit": fit,
}
"""All commands by name, in the order in which help lists them."""
