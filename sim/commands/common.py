"""What commands share: exit statuses, where files are, the progress line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from real.config import Scenario, ScenarioError
from real.flags import BAD_INPUT
from sim.faults import Fault, FaultError, parse_fault
from sim.faults.text import describe_kinds

FIXTURES: Final = Path(__file__).parent.parent.parent / "fixtures"
DEFAULT_SCENARIO: Final = FIXTURES / "configs" / "default.toml"
DIFFERS: Final = 1
"""Exit status when what was asked for does not hold."""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

Progress = Callable[[str], None]


def fail(message: str) -> int:
    """Says in one line what is wrong with the input and returns the exit status."""
    print(f"sim: {message}", file=sys.stderr)
    return BAD_INPUT


def add_fault_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that disturbs a run."""
    kinds = "; ".join(describe_kinds().splitlines())
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="disturb a run; may be given again. A name and KEY=VALUE words, those in brackets "
        f"may be left out: {kinds}",
    )


def add_require_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that makes a rule that the trace cannot show a failure."""
    parser.add_argument(
        "--require",
        metavar="RULES",
        help="rules that must be judged, as I1,I4: else the exit status is 1",
    )


def faults_of(arguments: argparse.Namespace, scenario: Scenario) -> tuple[Fault, ...]:
    """Returns the faults given as flags.

    Raises:
        ScenarioError: A fault that cannot be understood.
    """
    try:
        return tuple(parse_fault(text, scenario.world_size) for text in arguments.fault)
    except FaultError as error:
        raise ScenarioError(str(error)) from None


def no_progress(text: str) -> None:
    """Shows nothing."""


def progress_line() -> Progress:
    """Returns what shows one changing line on a terminal and nothing in a pipe.

    An empty text clears the line.
    """
    if not sys.stderr.isatty():
        return no_progress

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    return show
