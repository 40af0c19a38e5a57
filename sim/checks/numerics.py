"""I13 and I14 by value: gradients of a run against those of its reference, parameter by parameter.

A gradient that is the reference times a constant has a wrong divisor somewhere (I14). One that is
no multiple of it is not the sum of its microbatches' contributions (I13): some are missing, double
or of another step. Later steps start from weights that differ by rounding, so only the norm of a
whole unit is judged there, and coarsely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from real.result import MAX_GRAD_REL_ERROR
from sim.checks.base import Violation, unit_label

if TYPE_CHECKING:
    import torch

    from real.output import JobOutput

RULES_BY_VALUE: Final = ("I13", "I14")
"""What these comparisons judge."""

FACTOR_TOLERANCE: Final = 0.02
"""How far from 1 the factor of a whole tensor may be in the first step."""

LATER_FACTOR_TOLERANCE: Final = 0.25
"""The same for later steps, where routing may have moved some tokens."""


class _Fault(NamedTuple):
    """One gradient that is wrong: the rule, whose it is, how, and in which unit."""

    rule: str
    subject: str
    message: str
    unit: str | None


class _Fit(NamedTuple):
    """The multiple of the reference that comes closest to a gradient.

    Attributes:
        factor: The multiple.
        rest: What is left, at most, relative to the largest value of that multiple.
    """

    factor: float
    rest: float


def check_numerics(
    outputs: Sequence[JobOutput],
    references: Sequence[JobOutput],
    *,
    units: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
) -> list[Violation]:
    """Compares the gradients of some ranks with their reference.

    Args:
        outputs: One entry a rank.
        references: One entry a rank.
        units: The unit of each parameter, for the report.
        ranks: The ranks' numbers; None numbers them from 0.
    """
    numbers = range(len(outputs)) if ranks is None else ranks
    owners = dict(units or {})
    found = []
    for rank, output, reference in zip(numbers, outputs, references, strict=True):
        for step, (mine, theirs) in enumerate(zip(output.steps, reference.steps, strict=True)):
            if step == 0:
                faults = list(_judge_first(mine.gradients, theirs.gradients, owners))
            else:
                faults = list(_judge_later(mine.gradients, theirs.gradients, owners))
            found += [
                Violation(
                    rule=fault.rule,
                    rank=rank,
                    message=f"In step {step} the gradient of {fault.subject} {fault.message}.",
                    unit=unit_label(fault.unit),
                )
                for fault in faults
            ]
            if faults:
                break  # the steps that follow have the same fault, or its consequences
    return found


def _judge_first(
    gradients: Mapping[str, torch.Tensor],
    references: Mapping[str, torch.Tensor],
    owners: Mapping[str, str],
) -> Iterator[_Fault]:
    for name, gradient in gradients.items():
        reference = references[name]
        largest = float(reference.abs().max())
        difference = float((gradient - reference).abs().max())
        if difference <= MAX_GRAD_REL_ERROR * largest:
            continue
        fit = _fit(gradient, reference)
        factor = _number(fit.factor)
        if not (fit.rest <= MAX_GRAD_REL_ERROR and abs(fit.factor - 1) > FACTOR_TOLERANCE):
            rule, message = (
                "I13",
                (
                    f"is no multiple of that of the reference: closest to {factor} times it, with "
                    f"a rest of {fit.rest:.1%} of the largest value"
                ),
            )
        elif fit.factor == 0:
            rule, message = "I13", "is zero, and that of the reference is not"
        else:
            rule, message = "I14", f"is {factor} times that of the reference"
        yield _Fault(rule, name, message, owners.get(name))


def _judge_later(
    gradients: Mapping[str, torch.Tensor],
    references: Mapping[str, torch.Tensor],
    owners: Mapping[str, str],
) -> Iterator[_Fault]:
    squares: dict[str | None, list[float]] = {}
    for name, gradient in gradients.items():
        sums = squares.setdefault(owners.get(name), [0.0, 0.0])
        sums[0] += float(gradient.square().sum())
        sums[1] += float(references[name].square().sum())
    for unit, (mine, theirs) in squares.items():
        factor = math.sqrt(mine / theirs) if theirs else 1.0
        if not abs(factor - 1) <= LATER_FACTOR_TOLERANCE:
            message = f"is {_number(factor)} times as large as that of the reference"
            subject = "all parameters" if unit is None else f"unit {unit_label(unit)}"
            yield _Fault("I13", subject, message, unit)


def _fit(gradient: torch.Tensor, reference: torch.Tensor) -> _Fit:
    mine, theirs = gradient.double().flatten(), reference.double().flatten()
    square = float(theirs.dot(theirs))
    factor = float(mine.dot(theirs)) / square if square else float("inf")
    size = float((theirs * factor).abs().max()) if square else 0.0
    rest = float((mine - factor * theirs).abs().max()) if square else float("inf")
    if not size:
        return _Fit(factor=factor, rest=0.0 if not rest else float("inf"))
    return _Fit(factor=factor, rest=rest / size)


def _number(value: float) -> str:
    return f"{value:.3g}"
