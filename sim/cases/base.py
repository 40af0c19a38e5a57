"""One public fault case: the fault, its correct twin, and what has to be said about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sim.checks import Violation

Run = Callable[[], list[Violation]]


class Shown(StrEnum):
    """How a case is brought about."""

    SCENARIO = "scenario"
    """Megatron's own model and schedule, with one defect in the hooks or beside them."""

    KERNEL = "kernel"
    """A small body on fake ranks: real MFSDP units or torch modules under a faulty driver."""

    TRACE = "trace"
    """A short trace written by hand."""

    SOURCE = "source"
    """The text of the code itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way in which this integration has gone wrong in public.

    Attributes:
        id: Group letter and number.
        source: Address of the public thread or change, or its repository and number.
        title: What goes wrong, in one line.
        rules: Invariants, any of which names the fault.
        unit: Full name of the unit that has to be named, "<root>" for the root; None when the fault
            is of no unit, and then none may be named.
        shown: How it is brought about.
        defect: The defect, in one line.
        twin: What is right in the correct twin, in one line.
        faulty: Runs the fault and returns what was found; None when a CPU cannot show it.
        correct: Runs the twin; must find nothing.
        node: The schedule node that has to be named, or None.
        microbatch: The microbatch that has to be named, or None.
        not_on_cpu: Why a CPU cannot show it, or None.
    """

    id: str
    source: str
    title: str
    rules: tuple[str, ...]
    unit: str | None
    shown: Shown | None = None
    defect: str = ""
    twin: str = ""
    faulty: Run | None = None
    correct: Run | None = None
    node: str | None = None
    microbatch: int | None = None
    not_on_cpu: str | None = None

    def __post_init__(self) -> None:
        is_runnable = self.faulty is not None and self.correct is not None
        if is_runnable == (self.not_on_cpu is not None):
            raise ValueError(
                f"Expected case {self.id} to have both runs, or a reason why it has none."
            )

    def is_named_by(self, violation: Violation) -> bool:
        """Tells whether a violation names this fault: rule, rank and place, with no wild card."""
        return (
            violation.rule in self.rules
            and violation.unit == self.unit
            and violation.rank >= 0
            and (self.node is None or violation.node == self.node)
            and (self.microbatch is None or violation.microbatch == self.microbatch)
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one case.

    Attributes:
        id: The case.
        caught: The violation that names the fault, or None.
        instead: What was found instead, one line each, when the fault was not named.
        false_alarms: What was found in the correct twin, one line each.
        not_on_cpu: Why it was not run, or None.
    """

    id: str
    caught: Violation | None = None
    instead: tuple[str, ...] = ()
    false_alarms: tuple[str, ...] = ()
    not_on_cpu: str | None = None


def judge(case: Case) -> Verdict:
    """Runs both variants of a case."""
    if case.faulty is None or case.correct is None:
        return Verdict(id=case.id, not_on_cpu=case.not_on_cpu)
    found, error = _run(case.faulty)
    caught = next((violation for violation in found if case.is_named_by(violation)), None)
    instead = () if caught is not None else (*map(_line, found), *error)
    alarms, error = _run(case.correct)
    return Verdict(
        id=case.id, caught=caught, instead=instead, false_alarms=(*map(_line, alarms), *error)
    )


def _run(run: Run) -> tuple[list[Violation], tuple[str, ...]]:
    """Returns what a variant found; a variant that cannot run found nothing and says so."""
    try:
        return run(), ()
    except Exception as error:  # noqa: BLE001 - a case that breaks must not end the table
        return [], (f"{type(error).__name__}: {error}",)


def _line(violation: Violation) -> str:
    return " ".join(str(violation).split("\n")[:2])
