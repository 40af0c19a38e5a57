"""The one place that touches Megatron's private names.

Everything else under `real` speaks to the classes and functions of this module. It is checked
against one release series (`real.mcore.versions`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from real.mcore.versions import check_megatron_version

check_megatron_version()

from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import (  # noqa: E402
    FsdpContext,
    FsdpModule,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import DBuffer, Flat  # noqa: E402
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import (  # noqa: E402
    GlobalLayout,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.optimizer import (  # noqa: E402
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group import (  # noqa: E402,E501
    FsdpParameterGroup,
    get_containing_parameter_group,
)
from megatron.core.pipeline_parallel import combined_1f1b  # noqa: E402

# -- FSDP units -------------------------------------------------------------------------------


def is_fsdp_module(module: nn.Module) -> bool:
    """Tells MFSDP v2 units from other modules."""
    return isinstance(module, FsdpModule)


class MfsdpUnit:
    """`real.hooks.FsdpUnit` for an MFSDP v2 module.

    The module is held weakly: whoever keeps a unit does not keep the model.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
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
        return self.module._unshard_event

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


class MfsdpContext:
    """`real.hooks.FsdpContext` for the context that all units of a root share."""

    def __init__(self, context: FsdpContext) -> None:
        self._context = context

    @property
    def all_gather_stream(self) -> torch.cuda.Stream:
        """MFSDP's all-gather stream."""
        return self._context.allgather_stream

    @property
    def reduce_scatter_stream(self) -> torch.cuda.Stream:
        """MFSDP's reduce-scatter stream."""
        return self._context.reduce_scatter_stream

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a reduction finishes the outer axis of a hybrid mesh."""
        return bool(self._context.is_last_microbatch)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._context.is_last_microbatch = value


def initialize_context(root: nn.Module) -> MfsdpContext:
    """Gives every unit under `root` its name and one shared context. Repeated calls do nothing."""
    root._lazy_init_context()
    return MfsdpContext(root._context)


def collect_units(root: nn.Module) -> dict[str, MfsdpUnit]:
    """Returns all units under `root` by full name, in registration order."""
    return {
        name: MfsdpUnit(module, name)
        for name, module in root.named_modules()
        if is_fsdp_module(module)
    }


# -- MFSDP's own execution hooks --------------------------------------------------------------

_MODULE_HOOK_DICTIONARIES: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class _Detached(NamedTuple):
    hooks: Any
    key: int
    hook: Callable[..., Any]


def detach_execution_hooks(root: nn.Module) -> Callable[[], None]:
    """Takes off the hooks that MFSDP registers on its units, and returns what puts them back.

    They would gather, prefetch, release and reduce by a module's own calls, which the combined
    schedule never makes for a layer and makes at other times for the experts.
    """
    detached: list[_Detached] = []
    for module in root.modules():
        if not is_fsdp_module(module):
            continue
        dictionaries = [getattr(module, name) for name in _MODULE_HOOK_DICTIONARIES]
        for parameter in (p for g in module._parameter_groups for p in g.unsharded_parameters):
            if parameter._post_accumulate_grad_hooks:
                dictionaries.append(parameter._post_accumulate_grad_hooks)
        for hooks in dictionaries:
            for key, hook in list(hooks.items()):
                if getattr(hook, "__qualname__", "").startswith("FsdpModule."):
                    detached.append(_Detached(hooks, key, hooks.pop(key)))

    def attach() -> None:
        for hooks, key, hook in detached:
            hooks[key] = hook
        detached.clear()

    return attach


def divide_gradients(root: nn.Module, divisors: Mapping[str, int]) -> Callable[[], None]:
    """Divides full gradients of some units as autograd makes them, and returns what undoes it.

    For the plain schedule under MFSDP's own hooks, which leave no place between the last gradient
    of a unit and its reduction.
    """
    handles = []
    for name, unit in collect_units(root).items():
        divisor = divisors.get(name, 1)
        if divisor != 1:
            for parameter in unit.trainable_parameters.values():
                handles.append(
                    parameter.register_hook(functools.partial(torch.Tensor.div, other=divisor))
                )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# -- the combined schedule --------------------------------------------------------------------

_released_finder = combined_1f1b.find_megatron_fsdp
_num_joined = 0


def join_schedule(adapter_type: type) -> Callable[[], None]:
    """Makes `combined_1f1b` find adapters of `adapter_type`, and returns what undoes it.

    The released schedule looks for the v1 wrapper by class. The replacement keeps no model, so one
    of them serves every model and rank of the process; the last undo restores the original.
    """
    global _num_joined

    def find_adapter(model: Any) -> Any:
        wrapper = model
        while wrapper is not None:
            if isinstance(wrapper, adapter_type):
                return wrapper
            wrapper = getattr(wrapper, "module", None)
        return _released_finder(model)

    if _num_joined == 0:
        combined_1f1b.find_megatron_fsdp = find_adapter
    _num_joined += 1
    is_joined = True

    def leave() -> None:
        nonlocal is_joined
        global _num_joined
        if is_joined:
            is_joined = False
            _num_joined -= 1
            if _num_joined == 0:
                combined_1f1b.find_megatron_fsdp = _released_finder

    return leave


# -- state ------------------------------------------------------------------------------------


def guard_state_dict(root: nn.Module) -> list[Any]:
    """Makes `load_state_dict` safe on a sharded model, and returns the handles.

    It has to copy into the sharded main weights: `assign=True` would put tensors in their place
    that no buffer knows. After a load the model weights follow the main weights, as after a step.
    """

    def refuse_assign(
        module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "Expected load_state_dict(assign=False) of a model under MFSDP v2, got assign=True: "
                "its parameters are views of sharded buffers."
            )

    def refresh(module: nn.Module, _: Any) -> None:
        for _name, submodule in module.named_modules():
            if is_fsdp_module(submodule):
                for group in submodule._parameter_groups:
                    group.sync_model_weight_from_main_weight()

    return [
        root.register_load_state_dict_pre_hook(refuse_assign),
        root.register_load_state_dict_post_hook(refresh),
    ]


# -- layouts ----------------------------------------------------------------------------------

_released_build = GlobalLayout.__dict__["build"]
_num_memoizing = 0


def memoize_layouts() -> Callable[[], None]:
    """Makes MFSDP remember the layouts of its buffers, and returns what undoes it.

    MFSDP lays out every gradient buffer anew, at about a millisecond of host time each, although a
    layout is a frozen value that depends on shapes and ranks alone.
    """
    global _num_memoizing

    @functools.cache
    def build(tensor_shapes: tuple[torch.Size, ...], dp_size: int) -> GlobalLayout:
        return _released_build.__func__(GlobalLayout, tensor_shapes, dp_size=dp_size)

    def build_once(
        cls: type[GlobalLayout], tensor_shapes: Iterable[Any], dp_size: int
    ) -> GlobalLayout:
        return build(tuple(torch.Size(shape) for shape in tensor_shapes), dp_size)

    if _num_memoizing == 0:
        GlobalLayout.build = classmethod(build_once)
    _num_memoizing += 1
    is_memoizing = True

    def undo() -> None:
        nonlocal is_memoizing
        global _num_memoizing
        if is_memoizing:
            is_memoizing = False
            _num_memoizing -= 1
            if _num_memoizing == 0:
                GlobalLayout.build = _released_build

    return undo


# -- observation ------------------------------------------------------------------------------


class NodeCall(NamedTuple):
    """One run of a schedule node.

    Attributes:
        name: Megatron's name of the node.
        direction: "forward", "backward" or "wgrad".
        layer: "layer 3" counted from 1 as Megatron does, or None outside a layer.
        plan: Stands for the microbatch: equal for all nodes of one chunk plan.
        stream: The node's stream, or None before its first run.
    """

    name: str
    direction: str
    layer: str | None
    plan: object | None
    stream: Any


@contextmanager
def observed_nodes(
    before: Callable[[NodeCall], None], after: Callable[[NodeCall], None]
) -> Iterator[None]:
    """Calls `before` and `after` around every schedule node of the process."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.models.common.utils import TransformerLayerNode
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    build = TransformerLayerSchedulePlan._build_callable_nodes
    runs = {
        (ScheduleNode, "_forward"): "forward",
        (ScheduleNode, "_backward"): "backward",
        (TransformerLayerNode, "backward_dw"): "wgrad",
    }
    originals = {key: getattr(*key) for key in runs}

    def build_and_name(plan: Any, *args: Any, **kwargs: Any) -> None:
        build(plan, *args, **kwargs)
        for node in (plan.pre_dispatch_computation, plan.mlp, plan.moe_dispatch, plan.moe_combine):
            node.testbed_layer = f"layer {plan.layer.layer_number}"

    def observe(owner: type, method: str) -> Callable[..., Any]:
        original, direction = originals[owner, method], runs[owner, method]

        def run(node: Any, *args: Any, **kwargs: Any) -> Any:
            if direction == "wgrad" and not node.delay_wgrad_compute:
                return original(node, *args, **kwargs)
            call = NodeCall(
                name=node.name,
                direction=direction,
                layer=getattr(node, "testbed_layer", None),
                plan=getattr(node, "chunk_state", None),
                stream=None if callable(node.stream) else node.stream,
            )
            before(call)
            result = original(node, *args, **kwargs)
            after(call)
            return result

        return run

    TransformerLayerSchedulePlan._build_callable_nodes = build_and_name
    for owner, method in runs:
        setattr(owner, method, observe(owner, method))
    try:
        yield
    finally:
        TransformerLayerSchedulePlan._build_callable_nodes = build
        for (owner, method), original in originals.items():
            setattr(owner, method, original)


# -- process-wide state -----------------------------------------------------------------------

PROCESS_GLOBALS: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.parallel_state": (),
    "megatron.core.pipeline_parallel.utils": ("_COMM_STREAM",),
    "megatron.core.tensor_parallel.random": (
        "IS_CHECKPOINTING",
        "_CUDA_RNG_STATE_TRACKER",
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
    ),
    "megatron.core.num_microbatches_calculator": ("_GLOBAL_NUM_MICROBATCHES_CALCULATOR",),
    "megatron.core.rerun_state_machine": ("_GLOBAL_RERUN_STATE_MACHINE",),
    "megatron.core.transformer.moe.moe_logging": ("_MOE_METRICS_TRACKER",),
    "megatron.core.transformer.moe.fused_a2a": ("_buffer", "_hybrid_ep_buffer"),
    "megatron.core.distributed.param_and_grad_buffer": ("dist_reduce_scatter_func",),
}
"""Module globals that Megatron keeps once per process; an empty tuple means every private one."""

PROCESS_CLASS_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": ("main_loss_backward_scale",),
    "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler": (
        "main_loss_backward_scale",
    ),
    "megatron.core.transformer.moe.shared_experts.SharedExpertMLP": ("stream",),
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": (
        "cuda_dtoh_stream",
    ),
}
"""Class attributes that Megatron assigns at run time and so shares within a process."""


# -- optimizer --------------------------------------------------------------------------------


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer of sharded parameters refresh the model weights after each step.

    MFSDP's own hook does that in the order of a set of objects, which differs from rank to rank:
    where the refresh is a collective (sharded outer axis), ranks then gather different units at the
    same time. The order here is that of the optimizer's parameters.
    """
    before = set(optimizer._optimizer_step_post_hooks)
    fully_shard_optimizer(optimizer)
    (key,) = set(optimizer._optimizer_step_post_hooks) - before
    released_hook = optimizer._optimizer_step_post_hooks[key]
    released_sync = FsdpParameterGroup.sync_model_weight_from_main_weight

    def refresh(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stale: list[FsdpParameterGroup] = []
        FsdpParameterGroup.sync_model_weight_from_main_weight = lambda group: stale.append(group)
        try:
            released_hook(stepped, args, kwargs)
        finally:
            FsdpParameterGroup.sync_model_weight_from_main_weight = released_sync
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        groups = [get_containing_parameter_group(parameter) for parameter in parameters]
        for group in dict.fromkeys(groups):
            if group in stale:
                group.sync_model_weight_from_main_weight()

    optimizer._optimizer_step_post_hooks[key] = refresh


# -- gradients --------------------------------------------------------------------------------


class GradientShard(NamedTuple):
    """This rank's part of the gradients of one parameter group.

    Attributes:
        unit: Name of the unit.
        tensors: One view a parameter, of the rows that this rank holds; without padding.
        groups: Process groups over which the parts of one gradient are spread.
    """

    unit: str
    tensors: list[torch.Tensor]
    groups: tuple[torch.distributed.ProcessGroup, ...]


def gradient_shards(root: nn.Module) -> Iterator[GradientShard]:
    """Yields the reduced gradients of every trainable parameter group, in unit order.

    Raises:
        RuntimeError: A gradient is not reduced over the outer axis of a hybrid mesh yet.
    """
    for name, group in _trainable_groups(root):
        if group.sharded_parameters[0].grad is None:
            continue
        buffer = group.main_grad
        if buffer.placements != group.main_weight.placements:
            raise RuntimeError(
                f"Expected the gradients of FSDP unit {name or '<root>'!r} reduced over every "
                "axis, got them before the last microbatch."
            )
        tensors = [buffer.get_local_tensor(i) for i in range(len(group.parameter_names))]
        axes = [i for i, placement in enumerate(buffer.placements) if isinstance(placement, Flat)]
        yield GradientShard(
            name,
            [tensor for tensor in tensors if tensor.numel()] or tensors[:1],
            tuple(buffer.mesh.get_group(axis) for axis in axes),
        )


def full_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the reduced gradient of every trainable parameter, by full name.

    Shards of MFSDP v2 are uneven, which DTensor cannot gather; the buffers that hold them can.
    Collective: every rank of the units' meshes must call it. Shapes are the parameters' own.

    Raises:
        RuntimeError: A gradient is missing.
    """
    gradients: dict[str, torch.Tensor] = {}
    for unit_name, group in _trainable_groups(root):
        for name, parameter in zip(group.parameter_names, group.sharded_parameters, strict=True):
            if parameter.grad is None:
                raise RuntimeError(f"Expected a gradient of {unit_name}.{name}, got none.")
        gradients.update(_gather(unit_name, group, group.main_grad))
    return gradients


def full_weights(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the main weight of every trainable parameter, by full name. Collective."""
    weights: dict[str, torch.Tensor] = {}
    for unit_name, group in _trainable_groups(root):
        weights.update(_gather(unit_name, group, group.main_weight))
    return weights


def _trainable_groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        if is_fsdp_module(module):
            for group in module._parameter_groups:
                if group.requires_grad:
                    yield name, group


def _gather(unit_name: str, group: Any, buffer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for axis in range(buffer.mesh.ndim):  # outer axis first: sharded axes stay a suffix
        if isinstance(buffer.placements[axis], Flat):
            buffer = buffer.allgather(axis)
    for index, name in enumerate(group.parameter_names):
        full_name = f"{unit_name}.{name}" if unit_name else name
        yield full_name, buffer.get_local_tensor(index).detach().clone()


# -- process-wide state -----------------------------------------------------------------------

PROCESS_GLOBALS: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.parallel_state": (),
    "megatron.core.pipeline_parallel.utils": ("_COMM_STREAM",),
    "megatron.core.tensor_parallel.random": (
        "IS_CHECKPOINTING",
        "_CUDA_RNG_STATE_TRACKER",
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
    ),
    "megatron.core.num_microbatches_calculator": ("_GLOBAL_NUM_MICROBATCHES_CALCULATOR",),
    "megatron.core.rerun_state_machine": ("_GLOBAL_RERUN_STATE_MACHINE",),
    "megatron.core.transformer.moe.moe_logging": ("_MOE_METRICS_TRACKER",),
    "megatron.core.transformer.moe.fused_a2a": ("_buffer", "_hybrid_ep_buffer"),
    "megatron.core.distributed.param_and_grad_buffer": ("dist_reduce_scatter_func",),
}
"""Module globals that Megatron keeps once per process; an empty tuple means every private one."""

PROCESS_CLASS_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": ("main_loss_backward_scale",),
    "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler": (
        "main_loss_backward_scale",
    ),
    "megatron.core.transformer.moe.shared_experts.SharedExpertMLP": ("stream",),
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": (
        "cuda_dtoh_stream",
    ),
}
"""Class attributes that Megatron assigns at run time and so shares within a process."""


# -- optimizer --------------------------------------------------------------------------------


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer of sharded parameters refresh the model weights after each step.

    MFSDP's own hook does that in the order of a set of objects, which differs from rank to rank:
    where the refresh is a collective (sharded outer axis), ranks then gather different units at the
    same time. The order here is that of the optimizer's parameters.
    """
    before = set(optimizer._optimizer_step_post_hooks)
    fully_shard_optimizer(optimizer)
    (key,) = set(optimizer._optimizer_step_post_hooks) - before
    released_hook = optimizer._optimizer_step_post_hooks[key]
    released_sync = FsdpParameterGroup.sync_model_weight_from_main_weight

    def refresh(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stale: list[FsdpParameterGroup] = []
        FsdpParameterGroup.sync_model_weight_from_main_weight = lambda group: stale.append(group)
        try:
            released_hook(stepped, args, kwargs)
        finally:
            FsdpParameterGroup.sync_model_weight_from_main_weight = released_sync
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        groups = [get_containing_parameter_group(parameter) for parameter in parameters]
        for group in dict.fromkeys(groups):
            if group in stale:
                group.sync_model_weight_from_main_weight()

    optimizer._optimizer_step_post_hooks[key] = refresh


# -- gradients --------------------------------------------------------------------------------


class GradientShard(NamedTuple):
    """This rank's part of the gradients of one parameter group.

    Attributes:
        unit: Name of the unit.
        tensors: One view a parameter, of the rows that this rank holds; without padding.
        groups: Process groups over which the parts of one gradient are spread.
    """

    unit: str
    tensors: list[torch.Tensor]
    groups: tuple[torch.distributed.ProcessGroup, ...]


def gradient_shards(root: nn.Module) -> Iterator[GradientShard]:
    """Yields the reduced gradients of every trainable parameter group, in unit order.

    Raises:
        RuntimeError: A gradient is not reduced over the outer axis of a hybrid mesh yet.
    """
    for name, group in _trainable_groups(root):
        if group.sharded_parameters[0].grad is None:
            continue
        buffer = group.main_grad
        if buffer.placements != group.main_weight.placements:
            raise RuntimeError(
                f"Expected the gradients of FSDP unit {name or '<root>'!r} reduced over every "
                "axis, got them before the last microbatch."
            )
        tensors = [buffer.get_local_tensor(i) for i in range(len(group.parameter_names))]
        axes = [i for i, placement in enumerate(buffer.placements) if isinstance(placement, Flat)]
        yield GradientShard(
            name,
            [tensor for tensor in tensors if tensor.numel()] or tensors[:1],
            tuple(buffer.mesh.get_group(axis) for axis in axes),
        )


def full_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers the reduced gradient of every trainable parameter, by full name.

    Shards of MFSDP v2 are uneven, which DTensor cannot gather; the buffers that hold them can.
    Collective: every rank of the units' meshes must call it. Shapes are the parameters' own.

    Raises:
        RuntimeError: A gradient is missing.
    """
    gradients: dict[str, torch.Tensor] = {}
    for unit_name, module in root.named_modules():
        if not is_fsdp_module(module):
            continue
        for group in module._parameter_groups:
            if not group.requires_grad:
                continue
            for name, parameter in zip(
                group.parameter_names, group.sharded_parameters, strict=True
            ):
                if parameter.grad is None:
                    raise RuntimeError(f"Expected a gradient of {unit_name}.{name}, got none.")
            buffer = group.main_grad
            for axis in range(buffer.mesh.ndim):  # outer axis first: sharded axes stay a suffix
                if isinstance(buffer.placements[axis], Flat):
                    buffer = buffer.allgather(axis)
            for index, name in enumerate(group.parameter_names):
                full_name = f"{unit_name}.{name}" if unit_name else name
                gradients[full_name] = buffer.get_local_tensor(index).detach().clone()
    return gradients
