"""MFSDP v1 with Megatron's own hooks, as the release has it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp import mcore_fsdp_adapter

from real.config import Scenario
from real.mcore.model import build_model, make_config, seed_all
from real.mcore.training import run_step
from real.targets.base import TargetError
from real.targets.internals import mfsdp1
from real.targets.norms import clip, norm_of
from real.targets.optimizers import megatron_optimizer, step
from real.targets.points import job_points
from real.targets.records import StorageId, keep_storage_ids
from real.watch.points import Point

_VARIANTS: Final = ("optim_grads_params", "optim_grads")


class Mfsdp1:
    """MFSDP v1: weights, gradients and optimizer state sharded, or the last two alone.

    Args:
        variant: Megatron's sharding strategy; empty for "optim_grads_params".

    Raises:
        TargetError: There is no such variant.
    """

    has_own_first_step = True
    """Its first step in a job does what later ones do not repeat (`real.gpu.trace`)."""

    def __init__(self, variant: str = "") -> None:
        self.strategy = variant or _VARIANTS[0]
        if self.strategy not in _VARIANTS:
            raise TargetError(
                f"Expected a variant of target 'mfsdp1' among {', '.join(_VARIANTS)}; "
                f"got {variant!r}."
            )

    @property
    def name(self) -> str:
        """What `--target` calls it."""
        return f"mfsdp1:{self.strategy}"

    @property
    def title(self) -> str:
        """What a headline calls it."""
        return f"MFSDP v1 ({self.strategy})"

    def missing(self) -> list[str]:
        """Returns the names that the imported tree lacks."""
        names = ("FullyShardedDataParallel", "MegatronFSDP")
        return [
            f"{mcore_fsdp_adapter.__name__}.{name}"
            for name in names
            if not hasattr(mcore_fsdp_adapter, name)
        ]

    def build(self, scenario: Scenario) -> Mfsdp1Job:
        """Builds the model under the scenario's schedule."""
        is_overlapped = scenario.overlap_moe_expert_parallel_comm
        return Mfsdp1Job(scenario, self.strategy, is_overlapped=is_overlapped)

    def reference(self, scenario: Scenario) -> Mfsdp1Job:
        """Builds the model under the plain schedule."""
        return Mfsdp1Job(scenario, self.strategy, is_overlapped=False)

    def alone(self) -> AbstractContextManager[None]:
        """Makes a context in which ranks tell where their shards lie, and nobody judges it."""
        return mfsdp1.unjudged_shards()

    def bounds(self) -> dict[str, int]:
        """Returns nothing: how far MFSDP v1 gathers ahead is a number of elements."""
        return {}

    def points(self) -> Sequence[Point]:
        """Returns the methods to watch."""
        return (*mfsdp1.points(), *job_points(Mfsdp1Job))

    def describe(self, job: Any, storage_id: StorageId) -> None:
        """Records what the job has."""
        keep_storage_ids(storage_id)
        mfsdp1.describe(job.model)


class Mfsdp1Job:
    """A model under MFSDP v1 and Megatron's optimizer for it.

    Args:
        scenario: The run.
        strategy: What is sharded, in Megatron's words.
        is_overlapped: Whether the combined schedule runs.
    """

    def __init__(self, scenario: Scenario, strategy: str, *, is_overlapped: bool) -> None:
        seed_all(scenario)
        config = make_config(scenario, is_overlapped=is_overlapped)
        self._scenario = scenario
        self.model = mcore_fsdp_adapter.FullyShardedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                use_distributed_optimizer=True,
                data_parallel_sharding_strategy=strategy,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                delay_wgrad_compute=config.delay_wgrad_compute,
                # Else the optimizer's step ends with a gather of everything for the next one.
                fsdp_all_gather_in_start_param_sync=False,
            ),
            build_model(config, scenario),
        )
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = megatron_optimizer(scenario, self.model, is_distributed=True)

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        self.clear_gradients()
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gathers the reduced gradients. Collective."""
        return mfsdp1.full_gradients(self.model)

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks. Collective."""
        return norm_of(self.gradients())

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the sharded gradients."""
        clip(mfsdp1.gradient_shards(self.model), norm, self._scenario.clip_grad)

    def clear_gradients(self) -> None:
        """Clears the gradient buffers."""
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers the main weights. Collective."""
        return mfsdp1.full_weights(self.model)

    def release(self) -> None:
        """Does nothing: buffers go with the job."""

    def optimizer_step(self) -> None:
        """Updates the main weights and refreshes the model's."""
        step(self._optimizer)
