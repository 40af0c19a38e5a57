"""One module a command: `add` describes its flags, `run` does the work on this rank.

Modules import torch and Megatron inside `run`, so that bad input is answered first.
"""

from __future__ import annotations

import argparse
from typing import Any, Final, Protocol

from real.commands import bench, calibrate, parity, trace

Subparsers = Any  # argparse gives the class no public name


class Command(Protocol):
    """A module of this package."""

    def add(self, commands: Subparsers) -> None:
        """Adds the command's own parser."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command on this rank and returns its exit status."""
        ...


COMMANDS: Final[dict[str, Command]] = {
    "parity": parity,
    "trace": trace,
    "bench": bench,
    "calibrate": calibrate,
}
"""All commands by name, in the order in which help lists them."""
