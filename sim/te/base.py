"""Base of the stand-in's modules: parameters, their first values, delayed weight gradients.

Source: transformer_engine 2.17.1, `pytorch/module/base.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from sim.te.refusal import refuse_if
from sim.te.wgrad_store import WeightGradStore

InitMethod = Callable[[torch.Tensor], object]
DEFAULT_WEIGHT_STD = 0.023
PARALLEL_MODES = ("row", "column", None)


class RngStatesTracker(Protocol):
    """What the modules need of a random state tracker."""

    def fork(self, name: str = ...) -> AbstractContextManager[None]:
        """Draws from the state `name` inside the block."""
        ...


def constant_init(value: float) -> InitMethod:
    """Returns an init method that fills with `value`."""
    return partial(torch.nn.init.constant_, val=value)


def _default_init(weight: torch.Tensor) -> object:
    return torch.nn.init.normal_(weight, mean=0.0, std=DEFAULT_WEIGHT_STD)


@dataclass(frozen=True, kw_only=True)
class ParameterInit:
    """How one parameter gets its first values, at once or when it leaves the `meta` device."""

    init_fn: InitMethod
    get_rng_state_tracker: Callable[[], RngStatesTracker] | None


class TransformerEngineBaseModule(torch.nn.Module):
    """Common part of `Linear`, `LayerNormLinear`, `GroupedLinear` and `DotProductAttention`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, object] = {"fp8_checkpoint": False, "fp8_group": None}
        self.primary_weights_in_fp8 = False
        self.tp_group: torch.distributed.ProcessGroup | None = None
        self.tp_group_initialized = False
        self.tp_size = 1
        self.sequence_parallel = False
        self.use_bias = False
        self.fuse_wgrad_accumulation = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_store: WeightGradStore | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], object]] = []
        self.weight_names: list[str] = []
        self.bias_names: list[str] = []

    def fast_setattr(self, name: str, value: object) -> None:
        """Sets a plain attribute without torch's check for parameters and submodules."""
        self.__dict__[name] = value

    def module_setattr(self, name: str, value: object) -> None:
        """Sets an attribute the torch way; needed for parameters, buffers and submodules."""
        setattr(self, name, value)

    # -- parallelism --

    def set_tensor_parallel_group(self, tp_group: torch.distributed.ProcessGroup | None) -> None:
        """Remembers the tensor parallel group; only groups of one rank are modelled.

        Raises:
            NotImplementedError: the group has more than one rank.
        """
        if tp_group is not None:
            refuse_if(torch.distributed.get_world_size(tp_group) > 1, "tensor parallelism")
        self.fast_setattr("tp_group", tp_group)
        self.fast_setattr("tp_group_initialized", True)

    def _set_tensor_parallel(
        self,
        tp_group: torch.distributed.ProcessGroup | None,
        tp_size: int,
        parallel_mode: str | None,
    ) -> None:
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(
                f"Expected a parallel mode in {PARALLEL_MODES}, got {parallel_mode!r}."
            )
        # As in TE, a given group decides and `tp_size` only counts without one.
        refuse_if(tp_group is None and tp_size > 1, "tensor parallelism")
        self.tp_size = 1
        self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode

    # -- parameters --

    def register_parameter(
        self,
        name: str,
        param: Parameter | None,
        init_fn: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], RngStatesTracker] | None = None,
    ) -> None:
        """Registers a parameter, and how it is initialised the first time its name is seen.

        FSDP registers the same name again with a DTensor and no init method; the first one is kept.
        """
        super().register_parameter(name, param)
        if "param_init_meta" in self.__dict__ and name not in self.param_init_meta:
            self.param_init_meta[name] = ParameterInit(
                init_fn=init_fn or _default_init, get_rng_state_tracker=get_rng_state_tracker
            )

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Gives every own parameter its first values, after moving it off the `meta` device.

        A no-op when `defer_init`. Parameters are wrapped anew, as TE does, so attributes set on the
        old parameter objects do not survive.
        """
        if defer_init:
            return
        for name, registered in list(self.named_parameters(recurse=False)):
            local = registered._local_tensor if isinstance(registered, DTensor) else registered
            if local.device.type == "meta":
                local = torch.empty_like(local, device="cpu")
            self._initialize(name, local)
            if isinstance(registered, DTensor):
                local = DTensor.from_local(
                    local,
                    device_mesh=registered.device_mesh,
                    placements=registered.placements,
                    shape=registered.size(),
                    stride=registered.stride(),
                )
            self.module_setattr(name, Parameter(local))

    def _initialize(self, name: str, tensor: torch.Tensor) -> None:
        init = self.param_init_meta[name]
        with torch.no_grad():
            if init.get_rng_state_tracker is None:
                init.init_fn(tensor)
                return
            tracker_name = getattr(self, "rng_tracker_name", None)
            tracker = init.get_rng_state_tracker()
            with tracker.fork(tracker_name) if tracker_name else tracker.fork():
                init.init_fn(tensor)

    def _mark_delayed_parameters(self) -> None:
        # Tells whoever hooks gradients that AccumulateGrad says nothing about these parameters:
        # their gradient is complete after `backward_dw`, not after `backward`.
        for name, parameter in self.named_parameters():
            if name in self.weight_names or name in self.bias_names:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    # -- forward --

    def prepare_forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Fixes the compute dtype for this call and returns `inp`, contiguous.

        Raises:
            TypeError: a parameter has another dtype than the input, outside of autocast.
        """
        self.set_activation_dtype(inp)
        return inp.contiguous()

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        """Takes the compute dtype from autocast, else from the input.

        Raises:
            TypeError: a parameter has another dtype than the input, outside of autocast.
        """
        if torch.is_autocast_enabled("cuda"):
            self.fast_setattr("activation_dtype", torch.get_autocast_dtype("cuda"))
            return
        if self.activation_dtype == inp.dtype:
            return
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}."
                )
        self.fast_setattr("activation_dtype", inp.dtype)

    # -- delayed weight gradient --

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Appends a hook that `backward_dw` calls, without arguments, once gradients are set."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def need_backward_dw(self) -> bool:
        """Returns whether this module delays its weight gradient, pending or not."""
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        """Computes the oldest delayed weight gradient, sets it, and runs the hooks in order.

        `weight.grad` is ASSIGNED: what earlier microbatches left there is lost unless a hook has
        taken it. The bias gradient is set only where there is none. The weight is looked up by
        attribute now, so the module must hold the parameter that shall receive the gradient.
        A no-op when the module does not delay.

        Raises:
            RuntimeError: no backward is pending, or the gradient does not fit the parameter.
        """
        if not self.need_backward_dw():
            return
        assert self.wgrad_store is not None
        (wgrad, bgrad, *_), _ = self.wgrad_store.pop()
        assert isinstance(wgrad, torch.Tensor)
        (weight,) = self._get_weight_tensors()
        weight.grad = wgrad.to(weight.dtype)
        if self.use_bias:
            bias = getattr(self, self.bias_names[0])
            if bias.grad is None:
                bias.grad = bgrad.to(bias.dtype)  # type: ignore[attr-defined]
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.weight_names]

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    # -- state dict --

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing: there is no quantization state. Megatron calls it when it loads experts."""

    def get_extra_state(self) -> torch.Tensor:
        """Returns the empty state of a module without quantization; the key exists as in TE."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Accepts an empty state.

        Raises:
            NotImplementedError: the checkpoint holds quantization state.
        """
        refuse_if(state is not None and state.numel() > 0, "quantization state in checkpoints")


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Writes the three attributes by which Megatron knows how a parameter is partitioned."""
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Returns a placeholder gradient; zeros, since uninitialised memory differs between runs."""
    del zero
    return torch.zeros(shape, dtype=dtype)
