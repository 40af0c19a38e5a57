"""`LayerNormLinear`: a norm followed by a linear map, in one autograd node.

The weight and bias gradients can be put off; the gradients of the norm's own parameters always
come out of the ordinary backward, because dgrad passes through the norm.

Source: transformer_engine 2.17.1, `pytorch/module/layernorm_linear.py`.
"""

from collections.abc import Callable

import torch
from torch.nn import Parameter

from sim.te.affine import (
    AffineModule,
    LinearCall,
    SavedContext,
    linear_forward,
    weight_and_bias_gradient,
)
from sim.te.base import InitMethod, RngStatesTracker, constant_init
from sim.te.gemm import general_gemm
from sim.te.norm import norm_backward, norm_forward
from sim.te.refusal import refuse_if
from sim.te.storage import cast_if_needed, host_device, require_live
from sim.te.wgrad_store import WeightGradStore

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class _LayerNormLinearContext(SavedContext):
    call: LinearCall
    module: "LayerNormLinear"
    inp_shape: torch.Size
    requires_dgrad: bool
    requires_wgrad: bool


class _LayerNormLinear(torch.autograd.Function):
    """Saves the input, the norm's output, its weight and the weight itself."""

    @staticmethod
    def forward(
        ctx: _LayerNormLinearContext | None,
        inp: torch.Tensor,
        ln_weight: torch.Tensor,
        ln_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        module: "LayerNormLinear",
        call: LinearCall,
    ) -> torch.Tensor:
        dtype = call.activation_dtype
        inputmat = cast_if_needed(inp.view(-1, inp.shape[-1]), dtype)
        norm_weight = cast_if_needed(require_live(ln_weight, "norm weight in forward"), dtype)
        norm_bias = None if ln_bias is None else cast_if_needed(ln_bias, dtype)
        ln_out, statistics = norm_forward(
            inputmat,
            norm_weight,
            norm_bias,
            module.eps,
            module.zero_centered_gamma,
            module.normalization,
        )
        weightmat = cast_if_needed(require_live(weight, "weight in forward"), dtype)
        cast_bias = None if bias is None else cast_if_needed(bias, dtype)
        out = linear_forward(ln_out, weightmat, cast_bias)
        if ctx is not None:
            ctx.save_for_backward(
                inputmat, weightmat, weight, norm_weight, ln_out, *statistics, cast_bias
            )
            ctx.call = call
            ctx.module = module
            ctx.inp_shape = inp.shape
            ctx.requires_dgrad = inp.requires_grad
            ctx.requires_wgrad = weight.requires_grad
        return out.view(*inp.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(
        ctx: _LayerNormLinearContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        *present, bias = ctx.saved_tensors
        inputmat, weightmat, _, norm_weight, ln_out, *statistics = (
            tensor for tensor in present if tensor is not None
        )
        dtype = ctx.call.activation_dtype
        grad = cast_if_needed(grad_output.reshape(-1, grad_output.shape[-1]).contiguous(), dtype)
        require_live(weightmat, "weight saved for dgrad")
        # dgrad is needed even for an input without gradient: the norm's own parameters hang on it.
        dgrad = general_gemm(weightmat, grad, dtype, layout="NN", grad=True)[0]
        wgrad = bgrad = None
        if ctx.requires_wgrad:
            wgrad, bgrad = weight_and_bias_gradient(ln_out, grad, bias, ctx.call)
        dx, dgamma, dbeta = norm_backward(
            dgrad,
            inputmat,
            tuple(statistics),
            require_live(norm_weight, "norm weight saved for backward"),
            ctx.module.zero_centered_gamma,
            ctx.module.normalization,
        )
        return (
            dx.view(ctx.inp_shape) if ctx.requires_dgrad else None,
            dgamma,
            dbeta,
            wgrad,
            bgrad,
            None,
            None,
        )


class LayerNormLinear(AffineModule):
    """Norm, then affine map.

    Parameters, in this order: `layer_norm_weight` [in], `layer_norm_bias` [in] (None for RMSNorm),
    `weight` [out, in], `bias` [out] (an empty tensor without bias).
    """

    layer_norm_weight: Parameter
    layer_norm_bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], RngStatesTracker] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: object = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        """Allocates and initialises the parameters; `meta` defers both to `reset_parameters`.

        Raises:
            ValueError: unknown normalization.
            NotImplementedError: a feature outside of the stand-in is asked for.
        """
        # Megatron sets its own attributes, such as an rng tracker name, before this constructor.
        super().__init__(name)
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"Expected a normalization in {NORMALIZATIONS}, got {normalization!r}."
            )
        overlap = (ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        self._refuse_unmodelled(
            fuse_wgrad_accumulation, parameters_split, overlap, symmetric_ar_type
        )
        refuse_if(
            return_layernorm_output or return_layernorm_output_gathered, "return_layernorm_output"
        )
        refuse_if(parallel_mode == "row", "a norm with row parallelism")
        self._set_tensor_parallel(tp_group, tp_size, parallel_mode)
        self.in_features, self.out_features = in_features, out_features
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.return_layernorm_output = False
        self.return_layernorm_output_gathered = False
        self.symmetric_ar_type = symmetric_ar_type
        self.ub_name = ub_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self._register_norm_parameters(params_dtype, device)
        self._register_weight_and_bias(init_method, get_rng_state_tracker, params_dtype, device)
        self.reset_parameters(defer_init=host_device(device).type == "meta")
        self.gemm_bias_unfused_add = False
        if delay_wgrad_compute:
            self._mark_delayed_parameters()

    def _register_norm_parameters(
        self, params_dtype: torch.dtype | None, device: torch.device | str | int
    ) -> None:
        dtype = params_dtype or torch.get_default_dtype()
        where = host_device(device)
        gamma = Parameter(torch.empty(self.in_features, dtype=dtype, device=where))
        self.register_parameter(
            "layer_norm_weight", gamma, constant_init(float(not self.zero_centered_gamma))
        )
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
            return
        beta = Parameter(torch.empty(self.in_features, dtype=dtype, device=where))
        self.register_parameter("layer_norm_bias", beta, constant_init(0.0))

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialises the parameters and marks how Megatron treats them; a no-op when deferred."""
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        self._mark_parallelism()
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

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
        call = LinearCall(
            activation_dtype=self.activation_dtype,
            wgrad_store=self.wgrad_store if self.need_backward_dw() else None,
        )
        bias = self.bias
        gemm_bias = bias if self.apply_bias else None
        arguments = (
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            weight,
            gemm_bias,
            self,
            call,
        )
        if torch.is_grad_enabled():
            out = _LayerNormLinear.apply(*arguments)
        else:
            out = _LayerNormLinear.forward(None, *arguments)
        if self.return_bias:
            return out, cast_if_needed(bias, self.activation_dtype)
        return out  # type: ignore[no-any-return]
