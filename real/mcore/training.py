"""The scenario's body: data, loss and optimizer steps through Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from real.config import Scenario

Batch = dict[str, torch.Tensor]


def microbatches(scenario: Scenario, step: int) -> Iterator[Batch]:
    """Yields this rank's microbatches of one step: text that can be learned, next-token labels.

    Each token is the one before plus 1 or 2, so a model that trains brings its loss down.

    Each batch holds `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), all
    [micro_batch_size, seq_length]. They depend on seed, step, microbatch and data-parallel rank.
    """
    dp_rank = parallel_state.get_data_parallel_rank()
    for microbatch in range(scenario.num_microbatches):
        generator = torch.Generator().manual_seed(
            ((scenario.seed * 7919 + step) * 7919 + microbatch) * 7919 + dp_rank
        )
        shape = (scenario.micro_batch_size, scenario.seq_length + 1)
        moves = torch.randint(1, 3, shape, generator=generator)
        moves[:, 0] = torch.randint(scenario.vocab_size, shape[:1], generator=generator)
        text = (moves.cumsum(1) % scenario.vocab_size).cuda()
        positions = torch.arange(scenario.seq_length, device="cuda").expand(shape[0], -1)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": positions,
            "loss_mask": torch.ones(shape[0], scenario.seq_length, device="cuda"),
        }


def _loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(
    data: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Megatron's forward step function: the output or the schedule plan, and the loss function."""
    batch = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def run_step(model: Any, scenario: Scenario, step: int, *, is_evaluation: bool = False) -> float:
    """Runs forward and backward of one step; gradients are ready to read afterwards.

    Args:
        model: The model in its wrapper.
        scenario: The run.
        step: Chooses the data.
        is_evaluation: Run the forward alone, without gradients.

    Returns:
        The loss of the step: mean over microbatches and data-parallel ranks.
    """
    outputs = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=microbatches(scenario, step),
        model=model,
        num_microbatches=scenario.num_microbatches,
        seq_length=scenario.seq_length,
        micro_batch_size=scenario.micro_batch_size,
        forward_only=is_evaluation,
    )
    loss = torch.stack([output["lm loss"] for output in outputs]).mean()
    torch.distributed.all_reduce(
        loss, op=torch.distributed.ReduceOp.AVG, group=parallel_state.get_data_parallel_group()
    )
    return float(loss)


def make_optimizer(scenario: Scenario, parameters: list[torch.nn.Parameter]) -> Any:
    """Returns the scenario's optimizer over float32 main weights."""
    if scenario.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=scenario.lr)
    return torch.optim.Adam(parameters, lr=scenario.lr, foreach=False)
