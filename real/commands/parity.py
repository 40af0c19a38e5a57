"""`torchrun -m real parity`: trains a scenario and its reference and compares them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from real.commands.common import DIFFERS, add_scenario, scenario_of
from real.result import as_json, format_table


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parity = commands.add_parser(
        "parity",
        help="train a scenario and its reference and compare them",
        description="Exit status: 0 all agrees, 1 it does not, 2 bad input or machine.",
    )
    add_scenario(parity, "parity.toml")


def run(arguments: argparse.Namespace) -> int:
    """Runs both jobs; the first rank prints the comparison."""
    scenario = scenario_of(arguments)
    from real.gpu.parity import run_parity

    result = run_parity(scenario)
    if result is None:
        return 0
    print(json.dumps(as_json(result)) if arguments.json else format_table(scenario, result))
    return DIFFERS if result.problems() else 0
