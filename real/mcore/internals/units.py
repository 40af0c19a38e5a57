"""MFSDP v2 units and their context, in the words of `real.hooks`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import DBuffer, Flat
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import (
    FsdpContext,
    FsdpModule,
)
from torch import nn


def is_fsdp_module(module: nn.Module) -> bool:
    """Tells MFSDP v2 units from other modules."""
    return isinstance(module, FsdpModule)


def unit_of_sharded(parameter: nn.Parameter) -> str | None:
    """Returns the name of the unit whose sharded parameter this is; None for any other one."""
    group = getattr(parameter, "_mfsdp_parameter_group", None)
    group = getattr(group, "group", group)  # a link after the back references are loosened
    if group is None or all(sharded is not parameter for sharded in group.sharded_parameters):
        return None
    name: str | None = group.owning_module._name
    return name


class MfsdpUnit:
    """`real.hooks.FsdpUnit` for an MFSDP v2 module.

    The module is held weakly: whoever keeps a unit does not keep the model.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        parameters: dict[str, nn.Parameter] = {}
        for group in module._parameter_groups:
            if group.requires_grad:
                for local_name, parameter in zip(
                    group.parameter_names, group.unsharded_parameters, strict=True
                ):
                    parameters[f"{name}.{local_name}" if name else local_name] = parameter
        self.trainable_parameters: Mapping[str, nn.Parameter] = parameters

    @property
    def module(self) -> Any:
        """The module that is the unit."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"Cannot use FSDP unit {self.name!r} after its model is gone.")
        return module

    @property
    def unshard_event(self) -> torch.cuda.Event | None:
        """Recorded after the gather; None while sharded."""
        event: torch.cuda.Event | None = self.module._unshard_event
        return event

    def unshard(self) -> None:
        """Gathers on the all-gather stream; does nothing when gathered."""
        self.module._unshard_parameter_groups()

    def reshard(self) -> None:
        """Installs the shards and releases the full storage on the all-gather stream."""
        self.module._reshard_parameter_groups()

    def reduce_gradients(self) -> None:
        """Reduces the full gradients into the sharded ones.

        Raises:
            NotImplementedError: The outer axis of a hybrid mesh is sharded and gradients of an
                earlier window are still installed: clear them with `set_to_none=True`.
        """
        for group in self.module._parameter_groups:
            if group.requires_grad:
                self._begin_window(group)
        self.module._reduce_gradient_groups()

    def _begin_window(self, group: Any) -> None:
        """Gives a group whose gradient is sharded over the outer axis a new accumulator.

        After the last microbatch such a gradient rests finally sharded, and the release cannot take
        it back to where it accumulates. Its values have been used, so a new buffer is enough.
        """
        rests_at, accumulates_at = group.main_grad.placements, group._accumulation_placements
        if rests_at == accumulates_at or not isinstance(rests_at[0], Flat):
            return
        if any(parameter.grad is not None for parameter in group.sharded_parameters):
            raise NotImplementedError(
                f"Cannot accumulate into finished gradients of FSDP unit {self.name!r} with a "
                "sharded outer axis; call zero_grad(set_to_none=True) before the next step."
            )
        # On the stream that writes it first, so that it needs no record_stream().
        with torch.cuda.stream(self.module.context.reduce_scatter_stream):
            group.main_grad = DBuffer(
                mesh=group.mesh,
                placements=accumulates_at,
                tensor_shapes=group.main_grad.layout.tensor_shapes,
                dtype=group.main_grad.dtype,
                device=group.main_grad.device,
            )

    @property
    def ranks(self) -> list[int]:
        """Global ranks that the unit's parameters are spread over."""
        groups = self.module._parameter_groups
        return [int(rank) for rank in groups[0].mesh.mesh.flatten().tolist()] if groups else []

    @property
    def num_parameters(self) -> int:
        """Number of parameters, frozen ones included."""
        return sum(len(group.parameter_names) for group in self.module._parameter_groups)

    @property
    def full_bytes(self) -> int:
        """Bytes of all full parameter buffers, padding included."""
        return sum(
            group._unsharded_model_weight.local_buffer.numel()
            * group._unsharded_model_weight.local_buffer.element_size()
            for group in self.module._parameter_groups
        )


class OwnedParameter(NamedTuple):
    """One parameter of a model, and who owns it.

    Attributes:
        name: Full name under the root.
        unit: Name of the owner, or None without one.
        is_delayed: Whether its gradient comes from a later weight-gradient call.
        names: All names of the same full parameter.
        parameter: The full parameter, or what stands in the model when nobody owns it.
    """

    name: str
    unit: str | None
    is_delayed: bool
    names: list[str]
    parameter: nn.Parameter


def owned_parameters(root: nn.Module) -> Iterator[OwnedParameter]:
    """Yields every parameter of a sharded model, as MFSDP has it: one entry a unit and name."""
    entries: list[tuple[str, str | None, nn.Parameter]] = []
    for unit, module in root.named_modules():
        if is_fsdp_module(module):
            for group in module._parameter_groups:
                for local, full in zip(
                    group.parameter_names, group.unsharded_parameters, strict=True
                ):
                    entries.append((f"{unit}.{local}" if unit else local, unit, full))
    owned = {name for name, _, _ in entries}
    entries += [
        (name, None, parameter)
        for name, parameter in root.named_parameters(remove_duplicate=False)
        if name not in owned
    ]
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, _, full in entries:
        names = names_of.setdefault(full, [])
        if name not in names:
            names.append(name)
    for name, unit_name, full in entries:
        yield OwnedParameter(
            name=name,
            unit=unit_name,
            is_delayed=bool(getattr(full, "skip_backward_post_hook", False)),
            names=names_of[full],
            parameter=full,
        )


class MfsdpContext:
    """`real.hooks.FsdpContext` for the context that all units of a root share."""

    def __init__(self, context: FsdpContext) -> None:
        self._context = context

    @property
    def all_gather_stream(self) -> torch.cuda.Stream:
        """MFSDP's all-gather stream."""
        stream: torch.cuda.Stream = self._context.allgather_stream
        return stream

    @property
    def reduce_scatter_stream(self) -> torch.cuda.Stream:
        """MFSDP's reduce-scatter stream."""
        stream: torch.cuda.Stream = self._context.reduce_scatter_stream
        return stream

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a reduction finishes the outer axis of a hybrid mesh."""
        return bool(self._context.is_last_microbatch)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._context.is_last_microbatch = value


def initialize_context(root: Any) -> MfsdpContext:
    """Gives every unit under `root` its name and one shared context. Repeated calls do nothing."""
    root._lazy_init_context()
    return MfsdpContext(root._context)


def keep_accumulators(root: nn.Module) -> None:
    """Tells the allocator that the reduce-scatter stream uses the first gradient accumulators.

    MFSDP allocates them on the current stream when it shards a model. On a hybrid mesh the first
    last microbatch drops each on the reduce-scatter stream for one that is reduced over the outer
    axis as well, while that reduction still reads the old one: without the note the current
    stream's next allocation could overwrite it. Later ones come from the reduce-scatter stream; on
    a mesh of one axis the first one stays.
    """
    for module in root.modules():
        if is_fsdp_module(module):
            owner: Any = module
            for group in owner._parameter_groups:
                if not group.requires_grad:
                    continue
                if group.main_grad.placements != group.main_weight.placements:
                    group.main_grad.local_buffer.record_stream(owner.context.reduce_scatter_stream)


def collect_units(root: nn.Module) -> dict[str, MfsdpUnit]:
    """Returns all units under `root` by full name, in registration order."""
    return {
        name: MfsdpUnit(module, name)
        for name, module in root.named_modules()
        if is_fsdp_module(module)
    }


def unit_storages(root: nn.Module) -> Iterator[tuple[str, str, torch.UntypedStorage]]:
    """Yields unit, kind and storage of every buffer of every unit.

    Kinds are "full weight", "model weight" (sharded, what is gathered), "main weight" and
    "main gradient". Buffers of several parameter groups of one unit have the same kind.
    """
    for name, module in root.named_modules():
        if not is_fsdp_module(module):
            continue
        for group in module._parameter_groups:
            buffers = {
                "full weight": group._unsharded_model_weight,
                "model weight": group.model_weight,
                "main weight": group.main_weight,
                "main gradient": group.main_grad,
            }
            for kind, buffer in buffers.items():
                if buffer is not None:
                    yield name, kind, buffer.local_buffer.untyped_storage()
