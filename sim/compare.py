"""Compares what a scenario gave with what its reference gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from real.mcore.jobs import StepOutput


@dataclass(frozen=True, kw_only=True)
class GradientGap:
    """The largest difference between a gradient and its reference.

    Attributes:
        relative: Largest absolute difference over the tensor's largest absolute reference value.
        parameter: Full name of that tensor.
        rank: The rank that has it.
        step: The step, from 0.
    """

    relative: float
    parameter: str
    rank: int
    step: int


def step_gap(step: int, rank: int, output: StepOutput, reference: StepOutput) -> GradientGap:
    """Returns the largest relative difference among the gradients of one rank in one step.

    Raises:
        RuntimeError: The two have different parameters.
    """
    if output.gradients.keys() != reference.gradients.keys():
        odd = sorted(output.gradients.keys() ^ reference.gradients.keys())
        raise RuntimeError(f"Expected equal parameters, got these on one side only: {odd}.")
    worst = GradientGap(relative=0.0, parameter="", rank=rank, step=step)
    for name, gradient in output.gradients.items():
        expected = reference.gradients[name]
        difference = float((gradient - expected).abs().max())
        largest = float(expected.abs().max())
        relative = difference / largest if largest else (0.0 if not difference else float("inf"))
        if not relative <= worst.relative:  # also true for NaN
            worst = GradientGap(relative=relative, parameter=name, rank=rank, step=step)
    return worst


def largest(gaps: Sequence[GradientGap]) -> GradientGap:
    """Returns the largest gap; NaN counts as larger than everything."""
    worst = gaps[0]
    for gap in gaps[1:]:
        if not gap.relative <= worst.relative:
            worst = gap
    return worst
