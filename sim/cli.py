"""The command line of the bench: `python -m sim COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from real.config import ScenarioError
from real.flags import OneLineParser
from real.trace import TraceError
from sim.commands import COMMANDS
from sim.commands.common import BROKEN_PIPE, INTERRUPTED, fail


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = OneLineParser(
        prog="python -m sim", description="MFSDP v2 under combined 1F1B without a GPU."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    for command in COMMANDS.values():
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = COMMANDS[arguments.command].run(arguments, words)
        sys.stdout.flush()  # what is still buffered must not meet a closed pipe after this
        return status
    except (ScenarioError, TraceError) as error:
        return fail(str(error))
    except BrokenPipeError:
        # The reader has seen enough, as `head` does; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("\nsim: interrupted; the trace holds what was written so far.", file=sys.stderr)
        return INTERRUPTED
