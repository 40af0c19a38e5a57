"""`torchrun -m real parity`: trains a scenario and its reference and compares them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from real.commands.common import (
    DIFFERS,
    add_peers,
    add_scenario,
    add_watch,
    hosted_of,
    scenario_of,
)
from real.config import ScenarioError
from real.flags import add_hosting_flags
from real.reference import Reference, check_reference
from real.result import as_json, format_table


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parity = commands.add_parser(
        "parity",
        help="train a scenario and its reference and compare them",
        description="Exit status: 0 all agrees, 1 it does not, 2 bad input or machine.",
    )
    add_scenario(parity, "parity.toml")
    parity.add_argument(
        "--reference",
        type=Reference,
        choices=list(Reference),
        default=Reference.DISTOPT,
        help="compare with Megatron's distributed optimizer under the scenario's schedule "
        "(distopt, default), with its distributed data parallel under its plain schedule (ddp), or "
        "with the same target under its plain schedule (plain)",
    )
    parity.add_argument(
        "--schedule",
        choices=("plain", "combined"),
        help="short for --no-overlap-moe-expert-parallel-comm --no-delay-wgrad-compute, and for "
        "--overlap-moe-expert-parallel-comm",
    )
    add_hosting_flags(parity)
    add_peers(parity)
    add_watch(parity)


def run(arguments: argparse.Namespace) -> int:
    """Runs both jobs; the first rank prints the comparison."""
    if arguments.peers == "loopback" or arguments.rank is not None:
        raise ScenarioError(
            "Expected all ranks of a comparison, got one: with loopback peers losses mean nothing."
        )
    _apply_schedule(arguments)
    hosted = hosted_of(arguments)
    scenario = scenario_of(arguments)
    check_reference(scenario, arguments.reference)
    from real.gpu.parity import run_parity
    from real.gpu.watchdog import watched

    with watched(timeout_s=arguments.timeout, folder=arguments.report) as progress:
        result = run_parity(scenario, arguments.reference, hosted=hosted, on_progress=progress)
    if result is None:
        return 0
    print(json.dumps(as_json(result)) if arguments.json else format_table(scenario, result))
    return DIFFERS if result.problems() else 0


def _apply_schedule(arguments: argparse.Namespace) -> None:
    if arguments.schedule is None:
        return
    is_combined = arguments.schedule == "combined"
    wanted = {"overlap_moe_expert_parallel_comm": is_combined}
    if not is_combined:
        wanted["delay_wgrad_compute"] = False
    for name, value in wanted.items():
        if getattr(arguments, name) not in (None, value):
            raise ScenarioError(
                f"Expected --schedule {arguments.schedule} without a flag that says otherwise, got "
                f"{name.replace('_', '-')} {'off' if value else 'on'}."
            )
        setattr(arguments, name, value)
