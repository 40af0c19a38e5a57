"""`FusedAdam` and the multi-tensor functions, one tensor at a time.

Source: transformer_engine 2.17.1, `pytorch/optimizers/`, and the kernels that it names.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, overload

import torch
from torch.distributed.tensor import DTensor

from sim.te.refusal import refuse_if

TensorLists = Sequence[list[torch.Tensor]]
Result = TypeVar("Result")


class MultiTensorApply:
    """Calls a multi-tensor function, chunk size first and DTensors replaced by their shards."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Result],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: TensorLists,
        *args: object,
    ) -> Result:
        """Returns `op(chunk_size, noop_flag_buffer, lists, *args)`; changes the lists in place."""
        for tensors in tensor_lists:
            tensors[:] = [_local(tensor) for tensor in tensors]
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float | torch.Tensor
) -> None:
    """Writes `scale` times each tensor of the first list into the second.

    `noop_flag` is set to 1 when a source is not finite; the write happens all the same.
    """
    del chunk_size
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        wide = source.to(torch.promote_types(torch.float32, source.dtype))
        if not bool(torch.isfinite(wide).all()):
            noop_flag.fill_(1)
        target.copy_(wide * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor
) -> None:
    """Does as `multi_tensor_scale`, with the factor in a one-element tensor."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm over all tensors [1], norm of each; empty unless `per_tensor`), in fp32."""
    del chunk_size, noop_flag
    (tensors,) = tensor_lists
    squares = [tensor.to(torch.float32).square().sum() for tensor in tensors]
    each = torch.stack(squares) if squares else torch.zeros(0)
    return each.sum().sqrt().view(1), each.sqrt() if per_tensor else torch.empty(0)


class FusedAdam(torch.optim.Optimizer):
    """Adam with fp32 moments for parameters of any dtype; `step` counts in the parameter group.

    With `adam_w_mode` the weight decay acts on the parameter, else it is added to the gradient.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        """Takes the usual Adam options.

        `set_grad_none` is deprecated in TE and ignored: `zero_grad()` sets gradients to None.

        Raises:
            NotImplementedError: a precision-aware or capturable variant is asked for.
        """
        del master_weight_dtype, set_grad_none
        refuse_if(amsgrad, "AMSGrad")
        refuse_if(capturable, "a capturable FusedAdam")
        refuse_if(master_weights or store_param_remainders, "FusedAdam with master weights")
        refuse_if(use_decoupled_grad, "FusedAdam with decoupled gradients")
        refuse_if(
            {exp_avg_dtype, exp_avg_sq_dtype} != {torch.float32}, "FusedAdam moments below fp32"
        )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, group["betas"])
        return loss

    def _update(
        self, parameter: torch.nn.Parameter, group: dict[str, float], betas: tuple[float, float]
    ) -> None:
        state = self.state[parameter]
        if not state:
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=torch.float32)
        assert parameter.grad is not None
        target = _local(parameter)
        value, grad = target.float(), _local(parameter.grad).float()
        beta1, beta2 = betas
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * value
        first = _local(state["exp_avg"]).mul_(beta1).add_(grad, alpha=1 - beta1)
        second = _local(state["exp_avg_sq"]).mul_(beta2).add_(grad.square(), alpha=1 - beta2)
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        update = (first / correction1) / ((second / correction2).sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * value
        target.copy_(value - group["lr"] * update)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
