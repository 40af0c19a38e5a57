"""Compares numbers with the right ones and says which rule a difference breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from real.reference import MAX_LOSS_REL_ERROR
from real.result import MAX_GRAD_REL_ERROR
from sim.checks import Violation
from sim.checks.base import unit_label

if TYPE_CHECKING:
    from real.output import JobOutput

SCALE_TOLERANCE: Final = 2e-2
"""How closely all of a gradient must follow one factor to be called wrongly scaled."""


def check_losses(outputs: Sequence[JobOutput], references: Sequence[JobOutput]) -> list[Violation]:
    """Compares the losses of all steps and reports the first that differs.

    The first step's is made of the first weights alone (I1), a later one of gradients too (I13).
    """
    for step, (mine, theirs) in enumerate(zip(outputs[0].steps, references[0].steps, strict=True)):
        if not math.isclose(mine.loss, theirs.loss, rel_tol=MAX_LOSS_REL_ERROR):
            return [
                Violation(
                    rule="I1" if step == 0 else "I13",
                    rank=0,
                    message=f"Expected a loss of {theirs.loss} in step {step}, got {mine.loss}.",
                )
            ]
    return []


def compare_gradients(
    rank: int,
    gradients: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    units: Sequence[str],
) -> list[Violation]:
    """Compares gradients by name and returns one violation for each unit that differs.

    I14 when the whole unit is off by one factor, I13 otherwise: contributions are missing, come
    twice or are not finite.

    Args:
        rank: The rank that has them.
        gradients: Full gradients by full name.
        expected: The right ones.
        units: Names of the units, the root's being the empty string.
    """
    by_unit: dict[str, list[str]] = {}
    for name in expected:
        by_unit.setdefault(unit_of(name, units), []).append(name)
    found = []
    for unit, names in by_unit.items():
        worst = max(names, key=lambda name: _gap(gradients[name], expected[name]))
        gap = _gap(gradients[worst], expected[worst])
        if gap <= MAX_GRAD_REL_ERROR:
            continue
        factor = _factor([gradients[n] for n in names], [expected[n] for n in names])
        rule, how = ("I13", f"off by {gap:.2g} of its largest value")
        if factor is not None:
            rule, how = "I14", f"{factor:.3g} times what it should be"
        found.append(
            Violation(
                rule=rule,
                rank=rank,
                message=f"The gradient of {worst} is {how}.",
                unit=unit_label(unit),
            )
        )
    return found


def unit_of(parameter: str, units: Sequence[str]) -> str:
    """Returns the innermost unit that a parameter's full name lies in."""
    inside = [unit for unit in units if not unit or parameter.startswith(f"{unit}.")]
    return max(inside, key=len, default="")


def _gap(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite for NaN."""
    difference = float((gradient.float() - expected.float()).abs().max())
    largest = float(expected.abs().max())
    if math.isnan(difference):
        return math.inf
    return difference / largest if largest else (math.inf if difference else 0.0)


def _factor(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float | None:
    """Returns the one factor between two lists of tensors, or None when there is none."""
    mine = torch.cat([g.float().flatten() for g in gradients])
    theirs = torch.cat([e.float().flatten() for e in expected])
    factor = float((mine @ theirs) / (theirs @ theirs))
    if not math.isfinite(factor) or factor == 0.0:
        return None
    rest = float((mine - factor * theirs).abs().max())
    return factor if rest <= SCALE_TOLERANCE * abs(factor) * float(theirs.abs().max()) else None
