"""What `Linear` and `LayerNormLinear` share: one weight, one bias, and their gradients.

[Note: what backward returns] With delayed wgrad, both return None for the weight and the bias.
AccumulateGrad then leaves `.grad` as it was, yet its post-accumulate hooks still run: such a hook
finds no gradient, or the one of an earlier microbatch.

Source: transformer_engine 2.17.1, `pytorch/module/linear.py`, `layernorm_linear.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import Parameter

from sim.te.base import (
    InitMethod,
    RngStatesTracker,
    TransformerEngineBaseModule,
    constant_init,
    set_tensor_model_parallel_attributes,
)
from sim.te.gemm import general_gemm
from sim.te.refusal import refuse_if
from sim.te.storage import host_device
from sim.te.wgrad_store import WeightGradStore

WeightAndBiasGradient = tuple[torch.Tensor | None, torch.Tensor | None]


class SavedContext(Protocol):
    """The part of autograd's context that the functions here use."""

    saved_tensors: tuple[torch.Tensor | None, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keeps tensors for the backward."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """What one forward passes through autograd besides its tensors."""

    activation_dtype: torch.dtype
    wgrad_store: WeightGradStore | None


def linear_forward(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns inp [..., in] times weight [out, in] transposed, plus bias [out]: shape [..., out].

    Raises:
        ValueError: the last dimension of `inp` is not the weight's `in`.
    """
    if inp.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"Expected an input with {weight.shape[-1]} features, got {inp.shape[-1]}."
        )
    flat = inp.reshape(-1, inp.shape[-1])
    out = general_gemm(weight, flat, inp.dtype, bias=bias, layout="TN")[0]
    return out.view(*inp.shape[:-1], weight.shape[0])


def weight_and_bias_gradient(
    inp: torch.Tensor, grad_output: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
) -> WeightAndBiasGradient:
    """Computes both gradients now, or stores their inputs and returns (None, None).

    `inp` [tokens, in] is the GEMM's input, `grad_output` is [tokens, out]. There is no bias
    gradient when the saved `bias` is None, that is, when the GEMM had none.
    """

    def wgrad_gemm(x: torch.Tensor, dy: torch.Tensor) -> WeightAndBiasGradient:
        return general_gemm(x, dy, call.activation_dtype, bias=bias, layout="NT", grad=True)[:2]

    if call.wgrad_store is not None and call.wgrad_store.delay_wgrad_compute():
        call.wgrad_store.put([inp, grad_output], wgrad_gemm)
        return None, None
    return wgrad_gemm(inp, grad_output)


class AffineModule(TransformerEngineBaseModule):
    """Owner of a `weight` [out, in] and a `bias` [out], an empty tensor when there is none."""

    in_features: int
    out_features: int
    weight: Parameter
    bias: torch.Tensor

    def _refuse_unmodelled(
        self,
        fuse_wgrad_accumulation: bool,
        parameters_split: object,
        overlap: tuple[bool, ...],
        symmetric_ar_type: str | None,
    ) -> None:
        refuse_if(fuse_wgrad_accumulation, "fuse_wgrad_accumulation")
        refuse_if(parameters_split is not None, "parameters_split")
        refuse_if(any(overlap), "userbuffers overlap")
        refuse_if(symmetric_ar_type is not None, "symmetric memory all-reduce")

    def _register_weight_and_bias(
        self,
        init_method: InitMethod | None,
        get_rng_state_tracker: Callable[[], RngStatesTracker] | None,
        params_dtype: torch.dtype | None,
        device: torch.device | str | int,
    ) -> None:
        dtype = params_dtype or torch.get_default_dtype()
        where = host_device(device)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=where)
        self.register_parameter("weight", Parameter(weight), init_method, get_rng_state_tracker)
        bias = torch.empty(self.out_features if self.use_bias else 0, dtype=dtype, device=where)
        if self.use_bias:
            self.register_parameter("bias", Parameter(bias), constant_init(0.0))
        else:
            self.bias = bias

    def _mark_parallelism(self) -> None:
        is_row = self.parallel_mode == "row"
        set_tensor_model_parallel_attributes(self.weight, True, 1 if is_row else 0, 1)
        if self.use_bias and is_row:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.use_bias and self.parallel_mode == "column":
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
