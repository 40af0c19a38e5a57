"""The command line of the product: `torchrun --nproc-per-node N -m real COMMAND`."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from real.commands import COMMANDS
from real.commands.common import fail
from real.config import ScenarioError
from real.flags import OneLineParser
from real.targets import TargetError


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = OneLineParser(
        prog="torchrun -m real", description="FSDP under combined 1F1B on GPUs, one a process."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    for command in COMMANDS.values():
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command on this rank and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    warnings.simplefilter("ignore")
    try:
        return COMMANDS[arguments.command].run(arguments)
    except (ScenarioError, TargetError) as error:
        return fail(str(error))
    except RuntimeError as error:
        from real.gpu.world import Unready

        if isinstance(error, Unready):
            return fail(str(error))
        raise
