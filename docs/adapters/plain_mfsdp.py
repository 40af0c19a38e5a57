"""An adapter: the released MFSDP v2, driven by its own hooks alone. Explained in your-tree.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
    Flat,
    Placements,
    fully_shard,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import FsdpModule
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch.distributed import DeviceMesh

from real.config import Scenario
from real.mcore import internals
from real.mcore.model import build_model, make_config, seed_all
from real.mcore.training import make_optimizer, run_step
from real.targets.norms import clip, norm_of
from real.targets.points import job_points
from real.targets.records import (
    StorageId,
    keep_storage_ids,
    record_name,
    record_parameter,
    record_roles,
    record_unit,
)
from real.watch import Point, UnitView, reduce_point, reshard_point, unshard_point

_METHODS: Final = (
    "_unshard_parameter_groups",
    "_reshard_parameter_groups",
    "_reduce_gradient_groups",
)

# How to ask a unit: what makes it one is the class whose methods are watched.
_VIEW: Final = UnitView(
    name=lambda unit: unit._name or "",
    is_gathered=lambda unit: unit._unshard_event is not None,
)


class PlainMfsdp:
    """MFSDP v2 as the release has it."""

    name = "plain-mfsdp"
    title = "MFSDP v2 with its own hooks"

    def missing(self) -> list[str]:
        """Returns the names that the imported tree lacks."""
        return [f"FsdpModule.{name}" for name in _METHODS if not hasattr(FsdpModule, name)]

    def build(self, scenario: Scenario) -> PlainJob:
        """Builds the job under the scenario's schedule."""
        return PlainJob(scenario, is_overlapped=scenario.overlap_moe_expert_parallel_comm)

    def reference(self, scenario: Scenario) -> PlainJob:
        """Builds the job under the plain schedule."""
        return PlainJob(scenario, is_overlapped=False)

    def alone(self) -> AbstractContextManager[None]:
        """Makes a context that does nothing: no answer of a peer is looked at."""
        return nullcontext()

    def bounds(self) -> dict[str, int]:
        """Returns how many units may be unsharded at once: root, layer, experts, the next one."""
        return {"unsharded": 4, "packed": 1}

    def points(self) -> Sequence[Point]:
        """Returns the methods to watch."""
        unshard, reshard, reduce = _METHODS
        return (
            unshard_point(FsdpModule, unshard, _VIEW),
            reshard_point(FsdpModule, reshard, _VIEW),
            reduce_point(FsdpModule, reduce, _VIEW),
            *job_points(PlainJob),  # the optimizer and who reads gradients
        )

    def describe(self, job: PlainJob, storage_id: StorageId) -> None:
        """Records streams, units, parameters and buffers of a job that was just built."""
        keep_storage_ids(storage_id)
        context = job.model.context
        record_roles(context.allgather_stream, context.reduce_scatter_stream)
        for unit, group in job.groups():
            full = group._unsharded_model_weight.local_buffer
            record_unit(
                unit,
                parameters=group.unsharded_parameters,
                num_bytes=full.nbytes,
                ranks=[int(rank) for rank in group.mesh.mesh],
                divisor=job.divisor_of(unit),
            )
            for name, parameter in job.parameters_of(unit, group):
                record_parameter(unit, [name], parameter)
            record_name(unit, "full weight", full)
            record_name(unit, "model weight", group.model_weight.local_buffer)
            record_name(unit, "main weight", group.main_weight.local_buffer)
            record_name(unit, "main gradient", group.main_grad.local_buffer)


class PlainJob:
    """A GPT MoE whose experts, layers and root are units, and torch's optimizer over the shards."""

    def __init__(self, scenario: Scenario, *, is_overlapped: bool) -> None:
        seed_all(scenario)
        self._scenario = scenario
        self.model: Any = build_model(make_config(scenario, is_overlapped=is_overlapped), scenario)
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        expert = parallel_state.get_expert_data_parallel_group()
        for layer in self.model.decoder.layers:
            _shard(layer.mlp.experts, DeviceMesh.from_group(expert, "cuda", mesh_dim_names=("dp",)))
            _shard(layer, DeviceMesh.from_group(dense, "cuda", mesh_dim_names=("dp",)))
        _shard(self.model, DeviceMesh.from_group(dense, "cuda", mesh_dim_names=("dp",)))
        self.model._lazy_init_context()
        self._divide_experts()
        self._optimizer = make_optimizer(scenario, list(self.model.parameters()))
        # As `fully_shard_optimizer`, but refreshing weights in one order, not in that of a set.
        internals.shard_optimizer(self._optimizer)

    def _divide_experts(self) -> None:
        # An expert sums the tokens of all expert-parallel ranks; its mesh averages over fewer.
        for unit, group in self.groups():
            if self.divisor_of(unit) > 1:
                for parameter in group.unsharded_parameters:
                    parameter.register_hook(partial(torch.div, other=self.divisor_of(unit)))

    def divisor_of(self, unit: str) -> int:
        """Returns what a unit's gradients are divided by beside the mean over its mesh."""
        return self._scenario.expert_model_parallel_size if unit.endswith(".experts") else 1

    def groups(self) -> Iterator[tuple[str, Any]]:
        """Yields each unit's name and its parameters; in this model a unit has one group."""
        for name, module in self.model.named_modules():
            if isinstance(module, FsdpModule):
                for group in module._parameter_groups:
                    yield name, group

    def parameters_of(self, unit: str, group: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yields full name and full parameter."""
        names = [f"{unit}.{name}" if unit else name for name in group.parameter_names]
        yield from zip(names, group.unsharded_parameters, strict=True)

    def forward_backward(self, step: int) -> float:
        """Runs one step's microbatches and returns the mean loss."""
        return run_step(self.model, self._scenario, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gathers the reduced gradients. Collective."""
        return dict(self._whole("main_grad"))

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers the main weights. Collective."""
        return dict(self._whole("main_weight"))

    def _whole(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        for unit, group in self.groups():
            buffer = getattr(group, kind).allgather(0)
            for index, (name, _) in enumerate(self.parameters_of(unit, group)):
                yield name, buffer.get_local_tensor(index).detach().clone()

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all parameters of all ranks. Collective."""
        return norm_of(self.gradients())

    def clip(self, norm: torch.Tensor) -> None:
        """Clips the sharded gradients."""
        shards = (group.main_grad.local_buffer for _, group in self.groups())
        clip(shards, norm, self._scenario.clip_grad)

    def clear_gradients(self) -> None:
        """Clears the sharded gradients."""
        self._optimizer.zero_grad()

    def optimizer_step(self) -> None:
        """Updates the main weights, refreshes the model's, clears the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def release(self) -> None:
        """Does nothing: buffers go with the job."""


def _shard(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    flat = [Flat()]
    fully_shard(
        module,
        mesh,
        Placements(dp_axes=["dp"], parameter=flat, gradient=flat, optimizer=flat),
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32
        ),
    )
