"""The verdict on a run: what is broken, what was judged, and what nobody could judge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from real.reach import Reach
from real.trace import Trace
from sim.checks.base import Violation
from sim.checks.evidence import evidence_of
from sim.checks.rules import RULES, Judges, text_of_missing


class UnknownRule(ValueError):
    """A rule that is asked for and does not exist."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the checks say of the traces of one run.

    Attributes:
        violations: What is broken.
        reach: Which rules that took in.
    """

    violations: tuple[Violation, ...]
    reach: Reach

    @property
    def passed(self) -> bool:
        """Whether nothing is broken, the run is whole, and all that is required was judged."""
        return not self.violations and not self.reach.problems()


def required_rules(text: str | None) -> tuple[str, ...]:
    """Returns the rules of a list like "I1,I4".

    Raises:
        UnknownRule: One of them does not exist.
    """
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in RULES:
            raise UnknownRule(f"Expected rules I1 to I{len(RULES)} in --require, got {name!r}.")
    if text is not None and not names:
        raise UnknownRule(f"Expected rules I1 to I{len(RULES)} in --require, got none.")
    return names


def unseen(
    traces: Sequence[Trace], judges: Iterable[Judges], also: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns which rules are judged in part, and which not at all, each with the reason.

    Args:
        traces: One entry a rank.
        judges: What the checks that run judge.
        also: Rules that something else than a trace has judged.
    """
    evidence = {trace.rank: evidence_of(trace, len(traces)) for trace in traces}
    partly: dict[str, str] = {}
    not_judged: dict[str, str] = {}
    of_rule: dict[str, list[Judges]] = {rule: [] for rule in RULES}
    for judge in judges:
        of_rule[judge.rule].append(judge)
    for rule, candidates in of_rule.items():
        lacking = [(judge, _lacking(judge, evidence)) for judge in candidates]
        if rule in also or any(judge.is_whole and not text for judge, text in lacking):
            texts = dict.fromkeys(text for _, text in lacking if text)
            if texts:
                partly[rule] = "; ".join(texts)
        else:
            whole = [(judge, text) for judge, text in lacking if judge.is_whole]
            nearest = min(whole, key=lambda pair: _num_missing(pair[0], evidence))
            not_judged[rule] = nearest[1]
    return partly, not_judged


def _lacking(judge: Judges, evidence: Mapping[int, frozenset[str]]) -> str:
    """Returns what a check lacks to judge a rule, or nothing."""
    if not evidence:
        return "no traces"
    by_rank = {rank: judge.missing(held) for rank, held in evidence.items()}
    missing = tuple(word for word in judge.needs if any(word in lost for lost in by_rank.values()))
    if not missing:
        return ""
    ranks = [rank for rank, lost in by_rank.items() if lost]
    return text_of_missing(missing, [] if len(ranks) == len(by_rank) else ranks)


def _num_missing(judge: Judges, evidence: Mapping[int, frozenset[str]]) -> int:
    return max((len(judge.missing(held)) for held in evidence.values()), default=len(judge.needs))
