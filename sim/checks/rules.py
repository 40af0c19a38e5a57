"""The rules as values: what each asks, and which records a check needs to judge it.

A trace says only what somebody recorded. A check that finds none of the records that it looks at
finds no fault either, so each one declares what it needs, rule by rule (`Judges`), in the words
below. What a trace holds is told in the same words (`sim.checks.evidence`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from real.trace import OpKind


@dataclass(frozen=True)
class Rule:
    """One invariant of the hook contract.

    Attributes:
        id: Its number, I1 to I21.
        row: Its name in the contract's table of invariants.
        sentence: What holds in a correct run.
    """

    id: str
    row: str
    sentence: str


RULES: Final[dict[str, Rule]] = {
    rule.id: rule
    for rule in (
        Rule("I1", "use-implies-live", "A weight that is read is gathered, and waited for."),
        Rule("I2", "gather-once", "A unit is gathered once while it is unsharded."),
        Rule("I3", "pairing", "Every unit that is gathered is released; all rest at the end."),
        Rule("I4", "release-after-last-use", "A unit is released after its last reader."),
        Rule("I5", "exact completion", "A unit is reduced once, after all declared gradients."),
        Rule("I6", "grad present", "Every gradient is there, or zeros, when a unit is reduced."),
        Rule("I7", "wgrad before reduce", "A delayed gradient comes before the reduction."),
        Rule("I8", "fence", "Gradients are read after the last reduction of each unit."),
        Rule("I9", "optimizer -> gather", "Weights are gathered after the optimizer wrote them."),
        Rule("I10", "alloc stream", "Memory is reused after its stream has joined every user."),
        Rule("I11", "collective order", "All ranks of a group call the same in the same order."),
        Rule("I12", "participation", "All ranks of a group call equally often."),
        Rule("I13", "accumulation", "Gradients of all microbatches of a step are added up."),
        Rule("I14", "scale", "Gradients are divided by what their mesh asks for."),
        Rule("I15", "ownership", "A parameter has one owner: the nearest enclosing unit."),
        Rule("I16", "hook hygiene", "Hooks are installed once, and fire once a call."),
        Rule("I17", "recompute", "A recomputed forward changes nothing but its own gather."),
        Rule("I18", "phase/NVTX balance", "Phases follow the table, profiler ranges are closed."),
        Rule("I19", "capture safety", "A capture waits for nothing outside and joins its streams."),
        Rule("I20", "memory bound", "As few units are unsharded as the bound says."),
        Rule("I21", "autograd version", "A gather does not move the versions of saved weights."),
    )
}
"""All rules, by number."""


# -- what a check may need --------------------------------------------------------------------


def records_of(*ops: OpKind) -> str:
    """Returns the word for records of an operation, or of any of several."""
    return "/".join(op.name for op in ops)


def named(kind: str) -> str:
    """Returns the word for named storages of one kind."""
    return f"{kind} NAME"


GATHERS: Final = "all_gather COLLECTIVE"
"""Gathers that say which unit they are of."""

REDUCTIONS: Final = "reduction COLLECTIVE"
"""Reductions that say which unit they are of."""

COUNTED: Final = "counted PARAMETER"
"""Parameters that say how many gradients they get a microbatch."""

DIVISORS: Final = "divisor UNIT"
"""Units that say what their gradients are divided by."""

SEVERAL_RANKS: Final = "traces of other ranks"
BOUND: Final = "bound of unsharded units"
PACKED_BOUND: Final = "bound of packed gradients"

_NO_RECORDS: Final = (SEVERAL_RANKS, BOUND, PACKED_BOUND)


def text_of_missing(missing: Collection[str], ranks: Collection[int] = ()) -> str:
    """Returns why a rule is not judged: "no PARAMETER or HOOK records on rank 1".

    Args:
        missing: What was needed and is not there, in the words above.
        ranks: The ranks that lack it, where not all do.
    """
    records = [word for word in missing if word not in _NO_RECORDS]
    others = [word for word in missing if word in _NO_RECORDS]
    texts = [*([f"{_either(records)} records"] if records else []), *others]
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    return f"no {_either(texts)}{where}"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@dataclass(frozen=True)
class Judges:
    """That a check judges a rule, and what it needs for that.

    Attributes:
        rule: The rule's number.
        needs: What the trace of every rank must hold, in the words above.
        is_whole: False for a check that sees a part of the rule only: it does not make it judged.
    """

    rule: str
    needs: tuple[str, ...]
    is_whole: bool = True

    def missing(self, evidence: Iterable[str]) -> tuple[str, ...]:
        """Returns what is needed and not among the evidence."""
        held = set(evidence)
        return tuple(word for word in self.needs if word not in held)
