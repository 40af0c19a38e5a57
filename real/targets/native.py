"""A tree that joins MFSDP v2 and the combined schedule itself, with its own adapter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from real.config import Scenario, split_list
from real.mcore.model import build_model, make_config, seed_all
from real.mcore.training import run_step
from real.targets.base import TargetError
from real.targets.internals import native
from real.targets.norms import clip, norm_of
from real.targets.optimizers import megatron_optimizer, step
from real.targets.points import job_points
from real.targets.records import StorageId, keep_storage_ids
from real.watch.points import Point
from real.watch.records import fence_point

_MOST_UNSHARDED: Final = 5
"""Four as under the plain schedule: the root, a layer, its experts and the unit that is gathered
ahead. The combined schedule adds one of the other direction, where gradients are delayed."""


class Native:
    """MFSDP v2 in a tree's own wrapper, driven by the tree's own hooks.

    Args:
        variant: Flags of Megatron's config that are on, as "ep_overlap_early_attn_memory_release",
            with commas between them.

    Raises:
        TargetError: Megatron's config has no such flag.
    """

    def __init__(self, variant: str = "") -> None:
        self._flags = split_list(variant)
        for flag in self._flags:
            if type(getattr(TransformerConfig, flag, None)) is not bool:
                raise TargetError(
                    "Expected as variant of target 'native' a flag of Megatron's TransformerConfig,"
                    f" got {flag!r}."
                )

    @property
    def name(self) -> str:
        """What `--target` calls it."""
        return ":".join(["native", *([",".join(self._flags)] if self._flags else [])])

    @property
    def title(self) -> str:
        """What a headline calls it."""
        return "MFSDP v2 with the tree's own hooks"

    def missing(self) -> list[str]:
        """Returns the names that the imported tree lacks."""
        return native.missing_names()

    def build(self, scenario: Scenario) -> NativeJob:
        """Builds the model under the scenario's schedule."""
        return NativeJob(
            scenario, self._flags, is_overlapped=scenario.overlap_moe_expert_parallel_comm
        )

    def reference(self, scenario: Scenario) -> NativeJob:
        """Builds the model under the plain schedule."""
        return NativeJob(scenario, (), is_overlapped=False)

    def alone(self) -> AbstractContextManager[None]:
        """Makes a context that does nothing: no answer of a peer is looked at."""
        return nullcontext()

    def bounds(self) -> dict[str, int]:
        """Returns how many units may be unsharded at once."""
        return {"unsharded": _MOST_UNSHARDED}

    def points(self) -> Sequence[Point]:
        """Returns the methods to watch."""
        wrapper = mcore_fsdp_adapter.FullyShardedDataParallelV2
        fence = fence_point(wrapper, "finish_grad_sync")
        return (*native.points(), fence, *job_points(NativeJob))

    def describe(self, job: Any, storage_id: StorageId) -> None:
        """Records what the job has."""
        keep_storage_ids(storage_id)
        native.describe(job.model.module)


class NativeJob:
    """A model in the tree's MFSDP v2 wrapper and the tree's optimizer for it.

    Args:
        scenario: The run.
        flags: Flags of Megatron's config that are on.
        is_overlapped: Whether the combined schedule runs.
    """

    def __init__(self, scenario: Scenario, flags: Sequence[str], *, is_overlapped: bool) -> None:
        seed_all(scenario)
        config = make_config(scenario, is_overlapped=is_overlapped)
        for flag in flags:
            setattr(config, flag, True)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self._scenario = scenario
        self.model: Any = mcore_fsdp_adapter.FullyShardedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                megatron_fsdp_version=2,
                data_parallel_sharding_strategy="optim_grads_params",
                megatron_fsdp_main_grads_dtype=torch.float32,
                fsdp_all_gather_in_start_param_sync=False,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                delay_wgrad_compute=config.delay_wgrad_compute,
            ),
            build_model(config, scenario),
            pg_collection=groups,
        )
        config.no_sync_func = getattr(self.model, "no_sync", None)
        config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = megatron_optimizer(
            scenario, self.model, is_distributed=False, process_groups=groups
        )

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        self.clear_gradients()
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gathers the reduced gradients. Collective."""
        return native.full_gradients(self.model.module)

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks. Collective."""
        return norm_of(self.gradients())

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the sharded gradients."""
        clip(native.gradient_shards(self.model.module), norm, self._scenario.clip_grad)

    def clear_gradients(self) -> None:
        """Clears the sharded gradients."""
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers the main weights. Collective."""
        return native.full_weights(self.model.module)

    def release(self) -> None:
        """Does nothing: buffers go with the job."""

    def optimizer_step(self) -> None:
        """Updates the main weights and refreshes the model's."""
        step(self._optimizer)
