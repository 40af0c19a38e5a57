"""Compares what a scenario gave with what its reference gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from real.output import JobOutput, StepOutput


WEIGHT_ATOL: Final = 5e-3
WEIGHT_RTOL: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class WeightGap:
    """The largest difference between a main weight after the last step and its reference.

    Attributes:
        absolute: Largest absolute difference.
        parameter: Full name of that tensor.
        rank: The rank that has it.
        num_outside: Elements, over all ranks, further away than `WEIGHT_ATOL` plus `WEIGHT_RTOL`
            times the reference.
    """

    absolute: float
    parameter: str
    rank: int
    num_outside: int


def weight_gap(
    ranks: Sequence[int], outputs: Sequence[JobOutput], references: Sequence[JobOutput]
) -> WeightGap:
    """Compares the last weights of some ranks."""
    return worst_weights(
        [
            _weight_gap(rank, name, weight, reference.weights[name])
            for rank, output, reference in zip(ranks, outputs, references, strict=True)
            for name, weight in output.weights.items()
        ]
    )


def _weight_gap(rank: int, name: str, weight: torch.Tensor, expected: torch.Tensor) -> WeightGap:
    difference = (weight - expected).abs()
    is_inside = difference <= WEIGHT_ATOL + WEIGHT_RTOL * expected.abs()
    return WeightGap(
        absolute=float(difference.max()),
        parameter=name,
        rank=rank,
        num_outside=int((~is_inside).sum()),
    )


def worst_weights(gaps: Sequence[WeightGap]) -> WeightGap:
    """Returns the largest gap, with the elements outside of all of them; NaN is largest."""
    worst = gaps[0]
    for gap in gaps[1:]:
        if not gap.absolute <= worst.absolute:
            worst = gap
    return replace(worst, num_outside=sum(gap.num_outside for gap in gaps))


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
