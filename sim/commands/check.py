"""`python -m sim check`: judges the traces of a run and prints what is broken."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real.trace import TraceError, read_traces
from sim.commands.common import DIFFERS, add_require_flag, fail


def add(commands: Any) -> None:
    """Adds the command's parser."""
    check = commands.add_parser(
        "check",
        help="judge a trace",
        description="Judges the traces of one run, simulated or real. Exit status: 0 nothing "
        "broken, 1 violations, a trace that is no whole run, or a required rule that the trace "
        "cannot show, 2 no readable trace.",
    )
    check.add_argument("trace", type=Path, help="folder with one file a rank")
    add_require_flag(check)
    check.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Judges a trace."""
    from sim.checks import UnknownRule, fsdp_bytes, judge, required_rules

    try:
        require = required_rules(arguments.require)
    except UnknownRule as error:
        return fail(str(error))
    traces = read_traces(arguments.trace)
    try:
        verdict = judge(traces, require=require, replay=f"python -m sim {shlex.join(argv)}")
        memory = {trace.rank: fsdp_bytes(trace) for trace in traces}
    except TraceError as error:  # what no reader of single lines can see
        raise TraceError(f"{arguments.trace}: {error}") from None
    cut = [trace.rank for trace in traces if not trace.is_complete]
    num_records = sum(len(trace.records) for trace in traces)
    if arguments.json:
        print(
            json.dumps(
                {
                    "passed": verdict.passed,
                    "ranks": len(traces),
                    "num_records": num_records,
                    "incomplete_ranks": cut,
                    "violations": [violation.as_dict() for violation in verdict.violations],
                    **verdict.reach.as_dict(),
                    # None where the trace names no storage: it was recorded without kernels.
                    "fsdp_bytes": [
                        None if counted is None else {"rank": rank, **counted.as_dict()}
                        for rank, counted in memory.items()
                    ],
                }
            )
        )
    else:
        for violation in verdict.violations:
            print(violation)
        for rank, counted in memory.items():
            if counted is not None:
                print(
                    f"FSDP buffers of rank {rank}: {counted.resting_bytes} bytes at rest, "
                    f"{counted.peak_bytes} at most (record {counted.peak_seq})"
                )
        for line in [*verdict.reach.lines(), *verdict.reach.problems()]:
            print(line)
        print(
            f"{len(verdict.violations)} violations in {num_records} records of {len(traces)} ranks"
        )
    return 0 if verdict.passed else DIFFERS
