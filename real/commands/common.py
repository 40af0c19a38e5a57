"""What the commands of a GPU job share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from real.config import Scenario, ScenarioError, load_scenario
from real.flags import BAD_INPUT, add_scenario_flags, scenario_overrides
from real.targets import Hosted

if TYPE_CHECKING:
    from real.gpu.loopback import Seat

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


def add_peers(command: argparse.ArgumentParser) -> None:
    """Adds the flags of a process that stands for one rank of a job, alone."""
    command.add_argument(
        "--peers",
        choices=("nccl", "loopback"),
        default="nccl",
        help="loopback: one GPU, without torchrun, stands for one rank of any job; what the other "
        "ranks would send is made of its own, so losses mean nothing (default: %(default)s)",
    )
    command.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="with --peers loopback and --world-size: which rank to stand for",
    )


def hosted_of(arguments: argparse.Namespace) -> Hosted:
    """Returns what is under test by the flags of `add_hosting_flags`; nothing is imported yet.

    Raises:
        TargetError: There is no such target.
        ScenarioError: The folder holds no Megatron.
    """
    hosted = Hosted(arguments.target, arguments.megatron)
    hosted.check()
    return hosted


def seat_of(arguments: argparse.Namespace) -> Seat | None:
    """Returns the rank that this process stands for, alone; None for one that torchrun launched.

    Raises:
        ScenarioError: The flags make no rank of a job.
    """
    rank, world_size = arguments.rank, arguments.world_size
    if arguments.peers != "loopback":
        if rank is not None:
            raise ScenarioError(f"Expected --rank with --peers loopback only, got --rank {rank}.")
        return None
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise ScenarioError(
            f"Expected --peers loopback without torchrun, got one process of {launched}."
        )
    for name, value in (("world-size", world_size), ("rank", rank)):
        if value is None:
            raise ScenarioError(f"Expected --{name} with --peers loopback, got none.")
    if not 0 <= rank < world_size:
        raise ScenarioError(
            f"Expected --rank of 0 or more and less than --world-size {world_size}, got {rank}."
        )
    from real.gpu.loopback import Seat

    return Seat(rank, world_size)


def read_scenario(
    path: Path, arguments: argparse.Namespace, *, is_launched: bool = True
) -> Scenario:
    """Returns the scenario of a file with the flags of a command line.

    Args:
        path: The file.
        arguments: The flags.
        is_launched: Whether the number of ranks is torchrun's; else it is the flag's.

    Raises:
        ScenarioError: It cannot be run.
    """
    from real.gpu.world import scenario_of_launch

    scenario = load_scenario(path).changed(**scenario_overrides(arguments))
    return scenario_of_launch(scenario) if is_launched else scenario


def scenario_of(arguments: argparse.Namespace, *, is_launched: bool = True) -> Scenario:
    """Returns the scenario of a command line that names one file.

    Raises:
        ScenarioError: It cannot be run.
    """
    return read_scenario(arguments.scenario, arguments, is_launched=is_launched)
