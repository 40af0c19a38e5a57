"""I13 and I14 by value: gradients of a run against those of its reference, parameter by parameter.

A gradient that is the reference times a constant has a wrong divisor somewhere (I14). One that is
no multiple of it is not the sum of its microbatches' contributions (I13): some are missing, double
or of another step. Later steps start from weights that differ by rounding, so only the norm of a
whole unit is judged there, and coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from real.result import MAX_GRAD_REL_ERROR
from sim.checks.base import Violation, unit_label

if TYPE_CHECKING:
    import torch

    from real.mcore.jobs import JobOutput

FACTOR_TOLERANCE: Final = 0.02
"""How far from 1 the factor of a whole tensor may be in the first step."""

LATER_FACTOR_TOLERANCE: Final = 0.25
"""The same for later steps, where routing may have moved some tokens."""


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
    found = []
    for rank, output, reference in zip(numbers, outputs, references, strict=True):
        for step, (mine, theirs) in enumerate(zip(output.steps, reference.steps, strict=True)):
            judge = _judge_first if step == 0 else _judge_later
            faults = list(judge(mine.gradients, theirs.gradients))
            for rule, parameter, message in faults:
                unit = (units or {}).get(parameter)
                found.append(
                    Violation(
                        rule=rule,
                        rank=rank,
                        message=f"In step {step} the gradient of {parameter} {message}.",
                        unit=unit_label(unit),
                    )
                )
            if faults:
                break  # the steps that follow have the same fault, or its consequences
    return found


def _judge_first(
    gradients: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, str]]:
    for name, gradient in gradients.items():
        reference = references[name]
        largest = float(reference.abs().max())
        difference = float((gradient - reference).abs().max())
        if difference <= MAX_GRAD_REL_ERROR * largest:
            continue
        fit = _fit(gradient, reference)
        if fit.rest <= MAX_GRAD_REL_ERROR and abs(fit.factor - 1) > FACTOR_TOLERANCE:
            if fit.factor == 0:
                yield "I13", name, "is zero, and that of the reference is not"
            else:
                yield "I14", name, f"is {_number(fit.factor)} times that of the reference"
        else:
            yield (
                "I13",
                name,
                (
                    f"is no multiple of that of the reference: closest to {_number(fit.factor)} "
                    f"times it, with a rest of {fit.rest:.1%} of the largest value"
                ),
            )


def _judge_later(
    gradients: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, str]]:
    for name, gradient in gradients.items():
        reference = references[name]
        if not float(reference.abs().max()):
            continue
        factor = float(gradient.norm() / reference.norm())
        if not abs(factor - 1) <= LATER_FACTOR_TOLERANCE:
            yield "I13", name, f"is {_number(factor)} times as large as that of the reference"


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
