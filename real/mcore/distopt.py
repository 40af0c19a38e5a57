"""The reference of clusters: Megatron's distributed data parallel and its distributed optimizer.

Everything is Megatron's own: gradient buffers, reduce-scatter, norm, clipping, the update of
sharded main weights, the gather of the model weights, and the scenario's schedule, without FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from real.config import Scenario
from real.mcore.jobs import Job, ReferenceJob, empty_data_parallel
from real.mcore.model import build_model, make_config, seed_all
from real.mcore.training import run_step
from real.reference import Reference, check_reference


class DistOptJob:
    """The model under Megatron's distributed optimizer and the scenario's own schedule.

    Delayed weight gradients need no fused accumulation here: after each `backward_dw` the hooks
    that DDP registers with Transformer Engine add the weight's gradient to its float32 main one.

    Raises:
        ScenarioError: The distributed optimizer cannot train this scenario.
    """

    def __init__(self, scenario: Scenario) -> None:
        check_reference(scenario, Reference.DISTOPT)
        seed_all(scenario)
        config = make_config(scenario, is_overlapped=scenario.overlap_moe_expert_parallel_comm)
        self._scenario = scenario
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=True,
                delay_wgrad_compute=config.delay_wgrad_compute,
            ),
            build_model(config, scenario),
        )
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self._names = {
            weight: name
            for name, weight in self.model.module.named_parameters()
            if weight.requires_grad
        }
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=scenario.lr,
                weight_decay=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=scenario.clip_grad,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )

    def release(self) -> None:
        """Empties weights and gradient buffers."""
        empty_data_parallel(self.model)

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gathers the reduced gradients, of which each rank has one part of each bucket."""
        return self._gather(
            lambda bucket, part: bucket.grad_data[part.start : part.stop].float().clone()
        )

    def grad_norm(self) -> torch.Tensor:
        """Returns the optimizer's own norm over all parameters of all ranks. Collective."""
        self._optimizer.prepare_grads()
        return torch.as_tensor(self._optimizer.get_grad_norm())

    def clip(self, norm: torch.Tensor) -> None:
        """Does nothing: the optimizer clips by itself in its step."""

    def clear_gradients(self) -> None:
        """Does nothing: the next step clears the gradient buffer before it starts."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers the main weights, of which each rank has one part of each bucket."""
        return self._gather(_main_weights)

    def optimizer_step(self) -> None:
        """Clips, updates the main weights and gathers the model's.

        Raises:
            RuntimeError: A gradient is not finite.
        """
        has_updated, _, _ = self._optimizer.step()
        if not has_updated:
            raise RuntimeError("Expected finite gradients, got others: no weight was updated.")

    def _gather(self, part_of: Callable[[Any, range], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns full tensors by parameter name, of what `part_of` has of each bucket.

        Args:
            part_of: Returns this rank's part of a bucket, flat, float32, given the bucket and the
                elements that this rank keeps.
        """
        found = {}
        for bucket, group in self._buckets():
            size = bucket.grad_data.numel() // group.size()
            part = range(group.rank() * size, (group.rank() + 1) * size)
            whole = torch.empty(bucket.grad_data.numel(), device="cuda")
            torch.distributed.all_gather_into_tensor(whole, part_of(bucket, part), group=group)
            for weight, (start, end) in bucket.param_to_index.items():
                found[self._names[weight]] = whole[start:end].view(weight.shape).clone()
        return {name: found[name] for name in self._names.values()}  # in the model's order

    def _buckets(self) -> Iterator[tuple[Any, Any]]:
        """Yields every bucket with the ranks that share its optimizer state."""
        dense = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        expert = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        for buffers, group in (
            (self.model.buffers, dense),
            (self.model.expert_parallel_buffers, expert),
        ):
            for buffer in buffers:
                for bucket in buffer.buckets:
                    yield bucket, group


def make_reference(scenario: Scenario, reference: Reference) -> Job:
    """Builds the job that a scenario is compared with.

    Model parallel groups must be initialized for one distributed optimizer: without FSDP a hybrid
    mesh has no meaning.
    """
    return DistOptJob(scenario) if reference is Reference.DISTOPT else ReferenceJob(scenario)


def _main_weights(bucket: Any, part: range) -> torch.Tensor:
    """Returns the main weights of `part` of a bucket; padding is zero."""
    values = torch.zeros(len(part), device="cuda")
    for weight, (start, end) in bucket.param_to_index.items():
        first, last = max(start, part.start), min(end, part.stop)
        if first < last:
            values[first - part.start : last - part.start] = weight.main_param.detach().view(-1)
    return values
