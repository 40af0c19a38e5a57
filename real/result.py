"""The outcome of a scenario against its reference: numbers, a verdict, a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from real.compare import (
    WEIGHT_ATOL,
    WEIGHT_RTOL,
    GradientGap,
    WeightGap,
    largest,
    step_gap,
    weight_gap,
    worst_weights,
)
from real.config import Scenario
from real.reach import Reach
from real.reference import LOSS_BARS, Reference

if TYPE_CHECKING:
    from real.output import JobOutput

MAX_GRAD_REL_ERROR: Final = 1e-2
"""bf16 gradients, relative to the largest value of their tensor."""

MAX_GRAD_NORM_REL_ERROR: Final = 1e-3
"""Norm over all parameters."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The outcome of one scenario.

    Attributes:
        losses: One per step.
        reference_losses: One per step.
        gap: Largest gradient difference of the first step, where the weights are equal.
        later_gap: Largest gradient difference over all steps.
        weight_gap: Largest difference of the main weights after the last step.
        grad_norm_rel_error: Largest relative difference of the gradient norm.
        num_records: Trace records over all ranks.
        wall_s: Seconds for both jobs, imports excluded.
        trace: The folder of the trace, or None.
        violations: What the checks found in the trace, as text for a reader.
        reference: What it was compared with.
        reach: Which rules the trace could show, or None where it was not judged.
    """

    ranks: int
    losses: list[float]
    reference_losses: list[float]
    gap: GradientGap
    later_gap: GradientGap
    weight_gap: WeightGap
    grad_norm_rel_error: float
    num_records: int
    wall_s: float
    trace: Path | None
    violations: tuple[str, ...] = ()
    reference: Reference = Reference.DDP
    reach: Reach | None = None

    @property
    def loss_rel_errors(self) -> list[float]:
        """Relative difference of the loss, one per step."""
        return [
            abs(loss - expected) / abs(expected) if expected else abs(loss)
            for loss, expected in zip(self.losses, self.reference_losses, strict=True)
        ]

    def worst_of(self, others: Sequence[RunResult]) -> RunResult:
        """Returns one result for several ranks' own: their worst gaps and this one's losses."""
        return dataclasses.replace(
            self,
            ranks=sum(other.ranks for other in others),
            gap=largest([other.gap for other in others]),
            later_gap=largest([other.later_gap for other in others]),
            weight_gap=worst_weights([other.weight_gap for other in others]),
            grad_norm_rel_error=max(other.grad_norm_rel_error for other in others),
        )

    def problems(self) -> list[str]:
        """Returns what does not agree with the reference; empty when all does."""
        found = []
        if self.losses[0] != self.reference_losses[0]:
            found.append(
                f"Expected the first step's loss to equal the reference to the last bit, "
                f"got {self.losses[0]!r} and {self.reference_losses[0]!r}."
            )
        for step, error in enumerate(self.loss_rel_errors):
            bars = LOSS_BARS[self.reference]
            bar = bars.final if step == len(self.losses) - 1 else bars.step
            if not error <= bar:
                found.append(
                    f"Expected the loss of step {step} within {bar:g} relative of the reference, "
                    f"got {self.losses[step]!r} and {self.reference_losses[step]!r}."
                )
        if not self.gap.relative <= MAX_GRAD_REL_ERROR:
            found.append(
                f"Expected gradients within {MAX_GRAD_REL_ERROR:g} of the reference, got "
                f"{self.gap.relative:.2e} in {self.gap.parameter} on rank {self.gap.rank}."
            )
        if not self.grad_norm_rel_error <= MAX_GRAD_NORM_REL_ERROR:
            found.append(
                f"Expected gradient norms within {MAX_GRAD_NORM_REL_ERROR:g} of the reference, "
                f"got {self.grad_norm_rel_error:.2e}."
            )
        if self.weight_gap.num_outside:
            found.append(
                f"Expected main weights within atol {WEIGHT_ATOL:g} and rtol {WEIGHT_RTOL:g} of "
                f"the reference, got {self.weight_gap.num_outside} elements outside, at most "
                f"{self.weight_gap.absolute:.2e} in {self.weight_gap.parameter} on rank "
                f"{self.weight_gap.rank}."
            )
        found.extend(self.violations)
        found.extend(self.reach.problems() if self.reach is not None else [])
        return found


def judge(
    outputs: Sequence[JobOutput],
    references: Sequence[JobOutput],
    *,
    num_records: int,
    wall_s: float,
    trace: Path | None,
    ranks: Sequence[int] | None = None,
    reference: Reference = Reference.DDP,
) -> RunResult:
    """Compares the jobs of some ranks, step by step.

    Args:
        outputs: One entry a rank.
        references: One entry a rank.
        num_records: Records of the trace.
        wall_s: Seconds of both jobs.
        trace: Folder of the trace, or None.
        ranks: The ranks' numbers; None numbers them from 0.
        reference: What `references` are of.
    """
    numbers = list(range(len(outputs)) if ranks is None else ranks)
    gaps = [
        step_gap(step, rank, output, reference)
        for rank, mine, theirs in zip(numbers, outputs, references, strict=True)
        for step, (output, reference) in enumerate(zip(mine.steps, theirs.steps, strict=True))
    ]
    norms = [
        abs(output.grad_norm - reference.grad_norm) / reference.grad_norm
        for mine, theirs in zip(outputs, references, strict=True)
        for output, reference in zip(mine.steps, theirs.steps, strict=True)
    ]
    return RunResult(
        ranks=len(numbers),
        losses=[output.loss for output in outputs[0].steps],
        reference_losses=[reference.loss for reference in references[0].steps],
        gap=largest([gap for gap in gaps if gap.step == 0]),
        later_gap=largest(gaps),
        weight_gap=weight_gap(numbers, outputs, references),
        grad_norm_rel_error=max(norms),
        num_records=num_records,
        wall_s=wall_s,
        trace=trace,
        reference=reference,
    )


def as_json(result: RunResult) -> dict[str, Any]:
    """Returns the result as the JSON object that `--json` prints."""
    return {
        "passed": not result.problems(),
        "problems": result.problems(),
        "ranks": result.ranks,
        "reference": result.reference.value,
        "losses": result.losses,
        "reference_losses": result.reference_losses,
        "max_loss_rel_error": max(result.loss_rel_errors),
        "final_loss_rel_error": result.loss_rel_errors[-1],
        "max_grad_rel_error": result.gap.relative,
        "worst_parameter": result.gap.parameter,
        "worst_rank": result.gap.rank,
        "max_grad_rel_error_all_steps": result.later_gap.relative,
        "num_violations": len(result.violations),
        "grad_norm_rel_error": result.grad_norm_rel_error,
        "max_weight_error": result.weight_gap.absolute,
        "num_records": result.num_records,
        "wall_s": round(result.wall_s, 3),
        "trace": str(result.trace),
        **(result.reach.as_dict() if result.reach is not None else {}),
    }


def format_table(scenario: Scenario, result: RunResult) -> str:
    """Returns the comparison for a reader."""
    schedule = "combined 1F1B" if scenario.overlap_moe_expert_parallel_comm else "plain schedule"
    sizes = (
        f"{result.ranks} ranks, EP{scenario.expert_model_parallel_size} x expert-DP "
        f"{scenario.expert_data_parallel_size}, {scenario.num_layers} layers, "
        f"{scenario.num_microbatches} microbatches"
    )
    column = "distopt" if result.reference is Reference.DISTOPT else "no FSDP"
    lines = [
        f"MFSDP v2 under {schedule}: {sizes}",
        f"{'step':>4}  {'loss':>12}  {column:>12}  {'difference':>10}",
    ]
    for step, (loss, expected) in enumerate(
        zip(result.losses, result.reference_losses, strict=True)
    ):
        lines.append(f"{step:>4}  {loss:>12.8f}  {expected:>12.8f}  {loss - expected:>10.1e}")
    gap, weights = result.gap, result.weight_gap
    at_gap = f"in {gap.parameter} on rank {gap.rank}"
    at_weights = f"in {weights.parameter} on rank {weights.rank}"
    lines += [
        f"gradients of step 0: within {gap.relative:.1e} of a tensor's largest value, {at_gap}",
        f"gradient norms: within {result.grad_norm_rel_error:.1e} relative",
        f"main weights after the last step: within {weights.absolute:.1e}, {at_weights}",
    ]
    if result.trace is not None:
        lines.append(f"trace: {result.trace} ({result.num_records} records)")
    lines += result.reach.lines() if result.reach is not None else []
    lines.append(f"{result.wall_s:.1f} s, imports excluded")
    problems = result.problems()
    lines.append("all agrees with the reference" if not problems else "DOES NOT AGREE:")
    return "\n".join([*lines, *problems])
