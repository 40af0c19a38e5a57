"""How far a verdict on a run reaches: which rules its records could show, and which not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What was judged, and why not more.

    Attributes:
        judged: Rules that a check could judge on every rank, or that are broken.
        partly: Those of them of which a check saw only a part, with what it lacked.
        not_judged: The other rules, with the reason.
        required: Rules that must be judged.
        incomplete: Why the traces are not those of a whole run, one sentence each.
    """

    judged: tuple[str, ...] = ()
    partly: Mapping[str, str] = field(default_factory=dict)
    not_judged: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Returns why the verdict cannot be that all is well; empty when it can."""
        unmet = [rule for rule in self.required if rule in self.not_judged]
        return [
            *(f"incomplete: {reason}" for reason in self.incomplete),
            *(f"required and not judged: {rule} ({self.not_judged[rule]})" for rule in unmet),
        ]

    def lines(self) -> list[str]:
        """Returns what was not judged, for a reader; nothing where all was."""
        return [
            *([f"not judged: {_by_reason(self.not_judged)}"] if self.not_judged else []),
            *([f"partly judged: {_by_reason(self.partly)}"] if self.partly else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "judged": list(self.judged),
            "partly_judged": dict(self.partly),
            "not_judged": dict(self.not_judged),
            "required": list(self.required),
            "incomplete": list(self.incomplete),
        }


def _by_reason(rules: Mapping[str, str]) -> str:
    """Returns rules grouped by reason: "I5, I7 (no PARAMETER records), I19 (...)"."""
    order = list(dict.fromkeys(rules.values()))
    ordered = sorted(rules.items(), key=lambda item: order.index(item[1]))
    return ", ".join(
        f"{', '.join(rule for rule, _ in group)} ({reason})"
        for reason, group in groupby(ordered, key=lambda item: item[1])
    )
