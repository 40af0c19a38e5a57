"""What a job leaves on one rank: losses, gradients and weights. Nothing here needs Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one rank has after forward and backward of one step.

    Attributes:
        loss: Mean over microbatches and data-parallel ranks.
        grad_norm: Norm over all parameters of all ranks.
        gradients: Reduced gradients of this rank's parameters, full size, float32, unclipped.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class JobOutput:
    """What one rank has at the end of a job.

    Attributes:
        steps: One entry a step.
        weights: Main weights of this rank's parameters after the last step, full size, float32.
    """

    steps: list[StepOutput]
    weights: dict[str, torch.Tensor]
