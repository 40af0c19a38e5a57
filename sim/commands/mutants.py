"""`python -m sim mutants`: runs every mutant of the hooks and prints what noticed it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from sim.commands.common import DIFFERS, no_progress, progress_line


def add(commands: Any) -> None:
    """Adds the command's parser."""
    mutants = commands.add_parser(
        "mutants",
        help="take one duty of the hooks away at a time and see what notices",
        description="Exit status: 0 every mutant is noticed or equivalent, 1 one is not.",
    )
    mutants.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs every mutant."""
    from sim.quiet import quiet

    quiet()
    from sim.mutants import run_mutants

    progress = no_progress if arguments.json else progress_line()
    verdicts = run_mutants(progress=progress)
    progress("")
    survived = [v.name for v in verdicts if v.killed_by is None and v.equivalent is None]
    if arguments.json:
        print(
            json.dumps(
                {
                    "total": len(verdicts),
                    "killed": sum(v.killed_by is not None for v in verdicts),
                    "survived": survived,
                    "equivalent": [
                        v.name for v in verdicts if v.killed_by is None and v.equivalent
                    ],
                }
            )
        )
        return DIFFERS if survived else 0
    for verdict in verdicts:
        if verdict.killed_by is not None:
            print(f"killed      {verdict.name} ({verdict.scenario}): {verdict.killed_by}")
        elif verdict.equivalent is not None:
            print(f"equivalent  {verdict.name}: {verdict.equivalent}")
        else:
            print(f"SURVIVED    {verdict.name}")
    print(f"{len(verdicts) - len(survived)} of {len(verdicts)} noticed or equivalent")
    return DIFFERS if survived else 0
