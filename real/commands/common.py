"""What the commands of a GPU job share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from real.config import Scenario, load_scenario
from real.flags import BAD_INPUT, add_scenario_flags, scenario_overrides

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_FOLDER: Final = Path("runs") / "standing"
CONFIGS: Final = Path(__file__).parent.parent.parent / "fixtures" / "configs"
DIFFERS: Final = 1
"""Exit status when what was asked for does not hold."""


def is_first_rank() -> bool:
    """Whether this process speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def fail(message: str) -> int:
    """Says once for all ranks what is wrong with the input; returns the exit status."""
    if is_first_rank():
        print(f"real: {message}", file=sys.stderr)
    return BAD_INPUT


def add_scenario(command: argparse.ArgumentParser, default: str) -> None:
    """Adds the scenario file, one flag a scenario key, and `--json`."""
    command.add_argument("scenario", nargs="?", type=Path, default=CONFIGS / default)
    add_scenario_flags(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def add_watch(command: argparse.ArgumentParser) -> None:
    """Adds the flags of the watch over every rank."""
    command.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="without the end of a step (calibrate: a part) for so long, a rank writes where it "
        "stands and ends the job (default: %(default)g; 0: wait for ever)",
    )
    command.add_argument(
        "--report",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help="where each rank then writes its last records and its stacks (default: %(default)s)",
    )


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """Returns the scenario of a command line, with torchrun's number of ranks.

    Raises:
        ScenarioError: It cannot be run.
    """
    from real.gpu.world import scenario_of_launch

    return scenario_of_launch(
        load_scenario(arguments.scenario).changed(**scenario_overrides(arguments))
    )
