"""`Linear`: y = x W^T + b, with the weight gradient optionally put off.

See [Note: what backward returns] in `affine`.

Source: transformer_engine 2.17.1, `pytorch/module/linear.py`.
"""

from collections.abc import Callable

import torch

from sim.te.affine import (
    AffineModule,
    LinearCall,
    SavedContext,
    linear_forward,
    weight_and_bias_gradient,
)
from sim.te.base import InitMethod, RngStatesTracker
from sim.te.gemm import general_gemm
from sim.te.refusal import refuse_if
from sim.te.storage import cast_if_needed, host_device, require_live
from sim.te.wgrad_store import WeightGradStore


class _Linear(torch.autograd.Function):
    """Saves the weight itself, so a release of its storage before the backward is noticed."""

    @staticmethod
    def forward(
        ctx: "_LinearContext | None",
        weight: torch.Tensor,
        inp: torch.Tensor,
        bias: torch.Tensor | None,
        call: LinearCall,
    ) -> torch.Tensor:
        dtype = call.activation_dtype
        inputmat = cast_if_needed(inp, dtype)
        weightmat = cast_if_needed(require_live(weight, "weight in forward"), dtype)
        cast_bias = None if bias is None else cast_if_needed(bias, dtype)
        out = linear_forward(inputmat, weightmat, cast_bias)
        if ctx is not None:
            ctx.save_for_backward(
                inputmat if weight.requires_grad else None, weightmat, weight, cast_bias
            )
            ctx.call = call
            ctx.inp_shape = inp.shape
            ctx.requires_dgrad = inp.requires_grad
            ctx.requires_wgrad = weight.requires_grad
        return out

    @staticmethod
    def backward(
        ctx: "_LinearContext", grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        inputmat, weightmat, _, bias = ctx.saved_tensors
        dtype = ctx.call.activation_dtype
        grad = cast_if_needed(grad_output.reshape(-1, grad_output.shape[-1]).contiguous(), dtype)
        dgrad = wgrad = bgrad = None
        if ctx.requires_dgrad:
            assert weightmat is not None
            require_live(weightmat, "weight saved for dgrad")
            dgrad = general_gemm(weightmat, grad, dtype, layout="NN", grad=True)[0].view(
                ctx.inp_shape
            )
        if ctx.requires_wgrad:
            assert inputmat is not None
            wgrad, bgrad = weight_and_bias_gradient(
                inputmat.reshape(-1, inputmat.shape[-1]), grad, bias, ctx.call
            )
        return wgrad, dgrad, bgrad, None


class _LinearContext(SavedContext):
    call: LinearCall
    inp_shape: torch.Size
    requires_dgrad: bool
    requires_wgrad: bool


class Linear(AffineModule):
    """Affine map with parameters `weight` [out, in] and, with `bias`, `bias` [out].

    With `return_bias` the bias is not added but returned beside the output. With parallel mode
    `row` an added bias is added outside of the GEMM, so plain autograd owns its gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], RngStatesTracker] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: object = None,
        device: torch.device | str | int = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        """Allocates and initialises the parameters.

        Device `meta` defers both to `reset_parameters`; any other device is the CPU.
        `save_original_input` has no effect: without quantization that is what is saved.

        Raises:
            NotImplementedError: a feature outside of the stand-in is asked for.
        """
        super().__init__(name)
        overlap = (ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        self._refuse_unmodelled(
            fuse_wgrad_accumulation, parameters_split, overlap, symmetric_ar_type
        )
        self._set_tensor_parallel(tp_group, tp_size, parallel_mode)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.symmetric_ar_type = symmetric_ar_type
        self.save_original_input = save_original_input
        self.ub_name = ub_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self._register_weight_and_bias(init_method, get_rng_state_tracker, params_dtype, device)
        self.reset_parameters(defer_init=host_device(device).type == "meta")
        if delay_wgrad_compute:
            self._mark_delayed_parameters()

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialises the parameters and marks their partition; a no-op when deferred."""
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            self._mark_parallelism()

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Maps inp [..., in] to [..., out]; a pair with the bias when `return_bias`.

        `is_first_microbatch` only matters for quantized weights and gradient fusion: ignored.
        """
        refuse_if(fp8_output or fp8_grad, "FP8")
        inp = self.prepare_forward(inp)
        assert self.activation_dtype is not None
        (weight,) = self._get_weight_tensors()
        bias = self.bias if self.use_bias else None
        gemm_bias = bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        call = LinearCall(
            activation_dtype=self.activation_dtype,
            wgrad_store=self.wgrad_store if self.need_backward_dw() else None,
        )
        if torch.is_grad_enabled():
            out: torch.Tensor = _Linear.apply(weight, inp, gemm_bias, call)
        else:
            out = _Linear.forward(None, weight, inp, gemm_bias, call)
        if self.gemm_bias_unfused_add:
            assert bias is not None
            out = out + cast_if_needed(bias, self.activation_dtype)
        if self.return_bias:
            # Without a bias TE returns its empty placeholder, not None.
            return out, cast_if_needed(self.bias, self.activation_dtype)
        return out
