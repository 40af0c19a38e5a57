"""Runs cases, one after another or in forked workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from sim.cases.base import Case, Verdict, judge
from sim.session.aside import Aside, can_fork


def run_cases(
    cases: Sequence[Case], *, jobs: int = 1, progress: Callable[[str], None] = lambda _: None
) -> list[Verdict]:
    """Runs both variants of every case and returns one verdict each, in the order of `cases`.

    Args:
        cases: What to run.
        jobs: Number of processes. Each takes a run of neighbours, which share scenarios.
        progress: Shown one line of text now and then.
    """
    from sim.cases.worlds import bench

    jobs = min(jobs, len(cases)) if can_fork() else 1
    with ExitStack() as stack:
        stack.enter_context(bench())
        shares = [cases[len(cases) * i // jobs : len(cases) * (i + 1) // jobs] for i in range(jobs)]
        others = []
        for share in shares[1:]:
            other = Aside(lambda share=share: _run_share(share, lambda _: None))  # type: ignore[misc]
            stack.callback(other.stop)
            others.append(other)
        verdicts = _run_share(shares[0], progress) if shares else []
        for other in others:
            progress("waiting for the other processes")
            verdicts += other.result()
    return verdicts


def _run_share(cases: Sequence[Case], progress: Callable[[str], None]) -> list[Verdict]:
    verdicts = []
    for number, case in enumerate(cases, start=1):
        progress(f"case {number} of {len(cases)}: {case.id}")
        verdicts.append(judge(case))
    return verdicts
