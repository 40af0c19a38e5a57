"""`GroupedLinear`: one linear map for each local expert, applied to consecutive rows.

[Note: placeholder gradients] With delayed wgrad, TE's grouped backward still RETURNS its weight
gradient buffers to autograd, before anything was written to them. So AccumulateGrad leaves
meaningless values in the `.grad` of `weight0..N-1` until `backward_dw` assigns the real ones.
`Linear` and `LayerNormLinear` return None instead. The stand-in fills the buffers with NaN: whoever
reduces the gradient too early gets NaN every time, where a GPU gets whatever the memory held.

Source: transformer_engine 2.17.1, `pytorch/module/grouped_linear.py`, the path without
`NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from sim.cuda.shapes import kernel
from sim.te.affine import SavedContext
from sim.te.base import InitMethod, RngStatesTracker, TransformerEngineBaseModule, constant_init
from sim.te.gemm import general_grouped_gemm
from sim.te.refusal import refuse_if
from sim.te.storage import cast_if_needed, host_device, require_live
from sim.te.wgrad_store import WeightGradStore

GroupedGradient = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], None]


@dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """What one forward passes through autograd besides tensors; `m_splits` are rows by expert."""

    m_splits: tuple[int, ...]
    use_bias: bool
    activation_dtype: torch.dtype
    wgrad_store: WeightGradStore

    @property
    def num_gemms(self) -> int:
        """Number of local experts."""
        return len(self.m_splits)


class _GroupedLinearContext(SavedContext):
    call: GroupedCall
    inp_shape: torch.Size
    requires_dgrad: bool
    requires_wgrad: bool


class _GroupedLinear(torch.autograd.Function):
    """Saves the input rows of each expert and the weights themselves."""

    @staticmethod
    def forward(
        ctx: _GroupedLinearContext | None,
        inp: torch.Tensor,
        call: GroupedCall,
        *weights_and_biases: torch.Tensor,
    ) -> torch.Tensor:
        num_gemms, dtype = call.num_gemms, call.activation_dtype
        weights, biases = weights_and_biases[:num_gemms], weights_and_biases[num_gemms:]
        rows = cast_if_needed(inp.reshape(-1, weights[0].shape[-1]), dtype)
        inputs = torch.split(rows, list(call.m_splits))
        weightmats = [
            cast_if_needed(require_live(weight, f"weight{index} in forward"), dtype)
            for index, weight in enumerate(weights)
        ]
        bias_rows = (
            [cast_if_needed(bias, dtype) for bias in biases] if call.use_bias else list(biases)
        )
        out = torch.empty(rows.shape[0], weightmats[0].shape[0], dtype=dtype, device=inp.device)
        general_grouped_gemm(
            weightmats, inputs, [out], [None] * num_gemms, dtype,
            single_output=True, m_splits=call.m_splits, bias=bias_rows, use_bias=call.use_bias,
        )  # fmt: skip
        if ctx is not None:
            saved_inputs = inputs if weights[0].requires_grad else [None] * num_gemms
            ctx.save_for_backward(*saved_inputs, *weightmats, *bias_rows)
            ctx.call = call
            ctx.inp_shape = inp.shape
            ctx.requires_dgrad = inp.requires_grad
            ctx.requires_wgrad = weights[0].requires_grad
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(
        ctx: _GroupedLinearContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        num_gemms, dtype = call.num_gemms, call.activation_dtype
        inputs = saved[:num_gemms]
        weights = [tensor for tensor in saved[num_gemms : 2 * num_gemms] if tensor is not None]
        grad_rows = grad_output.contiguous().view(-1, grad_output.shape[-1])
        grads = torch.split(cast_if_needed(grad_rows, dtype), list(call.m_splits))
        dgrad = (
            _grouped_dgrad(weights, grads, call).view(ctx.inp_shape) if ctx.requires_dgrad else None
        )
        wgrads: Sequence[torch.Tensor | None] = [None] * num_gemms
        bgrads: Sequence[torch.Tensor | None] = [None] * num_gemms
        if ctx.requires_wgrad:
            # [Note: placeholder gradients]
            with kernel() as launch:
                packed = torch.full(
                    (num_gemms, *weights[0].shape), torch.nan, dtype=dtype, device=grad_rows.device
                )
                launch.writes = (packed,)
            buffers = [packed[index] for index in range(num_gemms)]
            wgrads = buffers
            grouped_wgrad = _make_grouped_wgrad(call, saved[2 * num_gemms :])
            if call.wgrad_store.delay_wgrad_compute():
                call.wgrad_store.put([inputs, grads, buffers], grouped_wgrad)
            else:
                bgrads = grouped_wgrad(inputs, grads, buffers)[1]
        return dgrad, None, *wgrads, *bgrads


def _grouped_dgrad(
    weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], call: GroupedCall
) -> torch.Tensor:
    for index, weight in enumerate(weights):
        require_live(weight, f"weight{index} saved for dgrad")
    dgrad = torch.empty(
        sum(call.m_splits), weights[0].shape[1], dtype=call.activation_dtype, device=grads[0].device
    )
    general_grouped_gemm(
        weights, grads, [dgrad], [None] * call.num_gemms, call.activation_dtype,
        layout="NN", single_output=True, m_splits=call.m_splits, grad=True,
    )  # fmt: skip
    return dgrad


def _make_grouped_wgrad(
    call: GroupedCall, biases: Sequence[torch.Tensor | None]
) -> Callable[..., GroupedGradient]:
    used = [bias for bias in biases if bias is not None] if call.use_bias else None

    def grouped_wgrad(
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> GroupedGradient:
        return general_grouped_gemm(
            inputs, grads, buffers, [None] * call.num_gemms, call.activation_dtype,
            layout="NT", grad=True, bias=used, use_bias=call.use_bias,
        )  # fmt: skip

    return grouped_wgrad


class GroupedLinear(TransformerEngineBaseModule):
    """`num_gemms` affine maps: parameters `weight0..` [out, in] and `bias0..` [out]."""

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | int = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        """Allocates and initialises the parameters; `meta` defers both to `reset_parameters`.

        Raises:
            NotImplementedError: a feature outside of the stand-in is asked for.
        """
        super().__init__(name)
        refuse_if(fuse_wgrad_accumulation, "fuse_wgrad_accumulation")
        refuse_if(ub_overlap_rs or ub_overlap_ag, "userbuffers overlap")
        refuse_if(single_grouped_weight or single_grouped_bias, "single grouped parameters")
        self._set_tensor_parallel(tp_group, tp_size, parallel_mode)
        self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        self.single_grouped_weight = self.single_grouped_bias = False
        self.init_method = init_method
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight_names = [f"weight{index}" for index in range(num_gemms)]
        self.bias_names = [f"bias{index}" for index in range(num_gemms)]
        where = host_device(device)
        for weight_name, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            self._register_expert(weight_name, bias_name, where)
        self.reset_parameters(defer_init=where.type == "meta")
        if delay_wgrad_compute:
            self._mark_delayed_parameters()

    def _register_expert(self, weight_name: str, bias_name: str, where: torch.device) -> None:
        weight = torch.empty(
            self.out_features, self.in_features, dtype=self.params_dtype, device=where
        )
        self.register_parameter(
            weight_name, Parameter(weight), self.init_method, self.get_rng_state_tracker
        )
        if self.use_bias:
            bias = torch.empty(self.out_features, dtype=self.params_dtype, device=where)
            self.register_parameter(bias_name, Parameter(bias), constant_init(0.0))
        else:
            setattr(self, bias_name, torch.empty(0, dtype=self.params_dtype, device=where))

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Applies map i to the i-th run of rows of inp [rows, in].

        `m_splits` are the rows of each expert, zeros included. `is_first_microbatch` only matters
        for quantized weights and gradient fusion: ignored.

        Raises:
            ValueError: there is not one split for each expert.
        """
        splits = tuple(
            int(rows)
            for rows in (m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits)
        )
        if len(splits) != self.num_gemms:
            raise ValueError(f"Expected {self.num_gemms} splits, got {len(splits)}.")
        inp = self.prepare_forward(inp)
        assert self.activation_dtype is not None
        assert self.wgrad_store is not None
        biases = [getattr(self, name) for name in self.bias_names]
        call = GroupedCall(
            m_splits=splits,
            use_bias=self.apply_bias,
            activation_dtype=self.activation_dtype,
            wgrad_store=self.wgrad_store,
        )
        if torch.is_grad_enabled():
            out = _GroupedLinear.apply(inp, call, *self._get_weight_tensors(), *biases)
        else:
            out = _GroupedLinear.forward(None, inp, call, *self._get_weight_tensors(), *biases)
        if self.return_bias:
            return out, [cast_if_needed(bias, self.activation_dtype) for bias in biases]
        return out  # type: ignore[no-any-return]

    def backward_dw(self) -> None:
        """Computes the oldest delayed gradients, assigns them to every weight, and runs the hooks.

        Unlike the other modules, a no-op (hooks included) when no backward is pending. A bias
        gradient is set only where there is none.
        """
        if not self.need_backward_dw():
            return
        assert self.wgrad_store is not None
        assert self.wgrad_store.context is not None
        if self.wgrad_store.context.empty():
            return
        (wgrads, bgrads, *_), _ = self.wgrad_store.pop()
        for weight, wgrad in zip(self._get_weight_tensors(), wgrads, strict=True):  # type: ignore[call-overload]
            weight.grad = wgrad.to(weight.dtype)
        if self.use_bias:
            for name, bgrad in zip(self.bias_names, bgrads, strict=True):  # type: ignore[call-overload]
                bias = getattr(self, name)
                if bgrad is not None and bias.grad is None:
                    bias.grad = bgrad.to(bias.dtype)
        self._trigger_wgrad_accumulation_and_reduce_hooks()
