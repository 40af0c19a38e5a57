"""The two training jobs that are compared: MFSDP v2 with the scenario's schedule, and none of it.

The reference is the same model on the same data under Megatron's own distributed data parallel and
its plain schedule. Both are built from the same seeds, so their first weights are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from real.config import Scenario
from real.hooks import Prefetch
from real.mcore import clip, internals
from real.mcore.model import build_model, make_config, seed_all
from real.mcore.schedule import wrap_model
from real.mcore.shard import make_meshes
from real.mcore.training import make_optimizer, run_step
from real.output import JobOutput, StepOutput
from real.trace import OpKind, active_recorder


class Job(Protocol):
    """A model that trains step by step."""

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the reduced gradient of every parameter, full size, by name."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks, a scalar."""
        ...

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the gradients to the scenario's largest norm, if it has one."""
        ...

    def optimizer_step(self) -> None:
        """Updates the weights and clears the gradients."""
        ...

    def clear_gradients(self) -> None:
        """Clears the gradients without a step."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the main weight of every trainable parameter, full size, float32, by name."""
        ...

    def release(self) -> None:
        """Gives back the memory that would stay when the job is dropped. Nothing may follow."""
        ...


class FsdpJob:
    """The model under MFSDP v2, with our hooks when the combined schedule is on.

    Model parallel groups must be initialized (`initialize_parallel`).
    """

    def __init__(self, scenario: Scenario) -> None:
        seed_all(scenario)
        config = make_config(scenario, is_overlapped=scenario.overlap_moe_expert_parallel_comm)
        module = build_model(config, scenario)
        meshes = make_meshes(
            num_outer=scenario.num_distributed_optimizer_instances,
            is_outer_sharded=scenario.outer_dp_sharding_strategy == "optim",
        )
        self._scenario = scenario
        self.model = wrap_model(
            config,
            module,
            meshes,
            expert_parallel_size=scenario.expert_model_parallel_size,
            prefetch=Prefetch(scenario.prefetch),
            is_fine_grained=scenario.fine_grained_hooks or None,
        )
        config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = make_optimizer(
            scenario, [weight for weight in module.parameters() if weight.requires_grad]
        )
        internals.shard_optimizer(self._optimizer)

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gathers the gradients of every unit. Collective."""
        return internals.full_gradients(self.model.module)

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks. Collective."""
        return clip.grad_norm(
            self.model.module,
            expert_units=self.model.expert_units,
            expert_group=parallel_state.get_expert_model_parallel_group(),
        )

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the sharded gradients."""
        if self._scenario.clip_grad:
            clip.clip_gradients(self.model.module, norm, self._scenario.clip_grad)

    def clear_gradients(self) -> None:
        """Clears the sharded gradients."""
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers the main weights of every unit. Collective."""
        return internals.full_weights(self.model.module)

    def release(self) -> None:
        """Does nothing: model, weights and gradients go with the job."""

    def optimizer_step(self) -> None:
        """Updates the main weights, refreshes the model weights, clears the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


def empty_data_parallel(model: DistributedDataParallel) -> None:
    """Empties the storages of a model under Megatron's data parallel.

    Its hooks on gradient accumulators keep the model, and the garbage collector does not see them.
    """
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    tensors = [*model.parameters(), *(buffer.grad_data for buffer in buffers)]
    tensors += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class ReferenceJob:
    """The model without FSDP, gradients reduced in float32.

    Args:
        scenario: The run.
        is_overlapped: Whether the combined schedule runs; the reference is the plain one.
    """

    def __init__(self, scenario: Scenario, *, is_overlapped: bool = False) -> None:
        seed_all(scenario)
        config = make_config(scenario, is_overlapped=is_overlapped)
        self._scenario = scenario
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                delay_wgrad_compute=config.delay_wgrad_compute,
            ),
            build_model(config, scenario),
        )
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self._weights = dict(self.model.module.named_parameters())
        self._main_weights = {
            name: torch.nn.Parameter(weight.detach().float())
            for name, weight in self._weights.items()
            if weight.requires_grad
        }
        self._optimizer = make_optimizer(scenario, list(self._main_weights.values()))

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        self.model.zero_grad_buffer()
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns copies of the reduced gradients."""
        return {
            name: weight.main_grad.clone()
            for name, weight in self._weights.items()
            if weight.requires_grad
        }

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks. Collective."""
        squares = torch.zeros(2, device="cuda")
        for name, gradient in self.gradients().items():
            squares[int(".experts." in name)] += gradient.square().sum()
        expert = squares[1].clone()
        torch.distributed.all_reduce(expert, group=parallel_state.get_expert_model_parallel_group())
        return (squares[0] + expert).sqrt()

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the reduced gradients."""
        if self._scenario.clip_grad:
            coefficient = (self._scenario.clip_grad / (norm + 1e-6)).clamp(max=1.0)
            for name in self._main_weights:
                self._weights[name].main_grad.mul_(coefficient)

    def clear_gradients(self) -> None:
        """Does nothing: the next step clears the gradient buffer before it starts."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of the main weights."""
        return {name: weight.detach().clone() for name, weight in self._main_weights.items()}

    def release(self) -> None:
        """Empties weights and gradient buffers."""
        empty_data_parallel(self.model)

    def optimizer_step(self) -> None:
        """Updates float32 main weights and rounds them into the model's."""
        for name, main_weight in self._main_weights.items():
            main_weight.grad = self._weights[name].main_grad
        self._optimizer.step()
        with torch.no_grad():
            for name, main_weight in self._main_weights.items():
                self._weights[name].copy_(main_weight)


def run_job(
    job: Job,
    scenario: Scenario,
    *,
    on_step: Callable[[int], None] | None = None,
    around_step: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> JobOutput:
    """Trains `scenario.train_iters` steps and returns what each one had, and the weights.

    Args:
        job: What is trained.
        scenario: The run.
        on_step: Called after each step with its number.
        around_step: Makes a context for each step, given its number.
    """
    outputs = []
    for step in range(scenario.train_iters):
        with around_step(step):
            outputs.append(_run_step(job, step))
        if on_step is not None:
            on_step(step)
    return JobOutput(steps=outputs, weights=job.weights())


def _run_step(job: Job, step: int) -> StepOutput:
    active_recorder().begin_step(step)
    loss = job.forward_backward(step)
    gradients = {name: grad.float() for name, grad in job.gradients().items()}
    norm = job.grad_norm()
    # The host reads the norm here and nothing after the optimizer: it would wait for its writes,
    # and the next gather would be in order without doing anything for it.
    output = StepOutput(loss=loss, grad_norm=float(norm), gradients=gradients)
    job.clip(norm)
    job.optimizer_step()
    active_recorder().record(OpKind.STEP, step=step, event="end")
    return output
