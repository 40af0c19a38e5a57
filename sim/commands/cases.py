"""`python -m sim cases`: runs public fault cases and prints who caught each one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.commands.common import DIFFERS, fail, no_progress, progress_line

if TYPE_CHECKING:
    from sim.cases import Case, Verdict


def add(commands: Any) -> None:
    """Adds the command's parser."""
    cases = commands.add_parser(
        "cases",
        help="run public fault cases and see whether each is caught by name",
        description="Each case runs twice: with the fault, which has to be named, and without it, "
        "which has to be silent. Exit status: 0 every case is caught and every twin silent, 1 not.",
    )
    cases.add_argument("ids", nargs="*", metavar="CASE", help="cases to run, as A1; default all")
    cases.add_argument(
        "--jobs", type=int, metavar="N", help="processes; default one for each core, at most 2"
    )
    cases.add_argument("--list", action="store_true", help="print what the cases are, run none")
    cases.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the cases that were asked for."""
    if arguments.jobs is not None and arguments.jobs < 1:
        return fail(f"Expected --jobs of 1 or more, got {arguments.jobs}.")
    from sim.quiet import quiet

    quiet()
    from sim.cases import all_cases
    from sim.cases.listing import as_list, as_markdown
    from sim.cases.run import run_cases

    known = {case.id: case for case in all_cases()}
    unknown = [name for name in arguments.ids if name not in known]
    if unknown:
        return fail(f"Expected ids of cases, as {', '.join(list(known)[:3])}; got {unknown[0]!r}.")
    cases = [case for case in known.values() if not arguments.ids or case.id in arguments.ids]
    if arguments.list:
        print(json.dumps(as_list(cases)) if arguments.json else as_markdown(cases), end="")
        return 0
    progress = no_progress if arguments.json else progress_line()
    jobs = arguments.jobs or min(2, os.cpu_count() or 1)
    verdicts = run_cases(cases, jobs=jobs, progress=progress)
    progress("")
    summary = summarize(verdicts)
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(format_table(cases, verdicts))
    return DIFFERS if summary["missed"] or summary["false_alarms"] else 0


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns what `--json` prints."""
    return {
        "total": len(verdicts),
        "caught": sum(v.caught is not None for v in verdicts),
        "missed": [v.id for v in verdicts if v.caught is None and v.not_on_cpu is None],
        "not_on_cpu": [v.id for v in verdicts if v.not_on_cpu is not None],
        "false_alarms": [v.id for v in verdicts if v.false_alarms],
    }


def format_table(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> str:
    """Returns the table for a reader, with what was found where a case was missed."""
    lines = [f"{'case':<5} {'expected':<10} {'caught by':<10} {'named':<58} twin"]
    for case, verdict in zip(cases, verdicts, strict=True):
        twin = "FALSE ALARM" if verdict.false_alarms else "silent"
        if verdict.not_on_cpu is not None:
            named, caught, twin = verdict.not_on_cpu, "not on CPU", ""
        elif verdict.caught is None:
            named, caught = case.unit or "", "MISSED"
        else:
            named, caught = _place(verdict), verdict.caught.rule
        lines.append(
            f"{case.id:<5} {'/'.join(case.rules):<10} {caught:<10} {named:<58} {twin}".rstrip()
        )
        lines += [f"      instead: {text}" for text in verdict.instead[:3]]
        lines += [f"      twin: {text}" for text in verdict.false_alarms[:3]]
        if verdict.caught is None and verdict.not_on_cpu is None and not verdict.instead:
            lines.append("      instead: nothing")
    found = summarize(verdicts)
    lines.append(
        f"{found['caught']} of {found['total']} caught, {len(found['missed'])} missed, "
        f"{len(found['not_on_cpu'])} not on a CPU, {len(found['false_alarms'])} false alarms"
    )
    return "\n".join(lines)


def _place(verdict: Verdict) -> str:
    found = verdict.caught
    assert found is not None
    parts = [f"rank {found.rank}", *([found.unit] if found.unit is not None else [])]
    if found.node is not None:
        parts.append(found.node)
    if found.microbatch is not None:
        parts.append(f"microbatch {found.microbatch}")
    return ", ".join(parts)
