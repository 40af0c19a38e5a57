"""Norm arithmetic, and the modules `RMSNorm` and `LayerNorm`.

[Note: norm weight in backward] The norm modules do not save their weight: their backward looks up
`module.weight` again. So the module must hold the full parameter during its backward. The norm
inside `LayerNormLinear` saves it instead.

Source: transformer_engine 2.17.1, `pytorch/ops/basic/rmsnorm.py`, `layer_norm.py`, and
`pytorch/ops/fuser.py`.
"""

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from sim.cuda.shapes import kernel
from sim.te.affine import SavedContext
from sim.te.refusal import refuse_if
from sim.te.storage import host_device, require_live

Statistics = tuple[torch.Tensor, ...]


def norm_forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    normalization: str,
) -> tuple[torch.Tensor, Statistics]:
    """Normalises the rows of x [rows, features]; computes in fp32 (or better), returns x's dtype.

    `normalization` is `LayerNorm` or `RMSNorm`; only the first reads `beta`.

    Returns:
        (output, (mean, 1/std)) for LayerNorm, (output, (1/rms,)) for RMSNorm; statistics [rows, 1].
    """
    with kernel(f"te:{normalization.lower()}_forward", reads=(x, gamma, beta)) as launch:
        out, statistics = _normalise(x, gamma, beta, eps, zero_centered_gamma, normalization)
        launch.writes = (out, *statistics)
    return out, statistics


def _normalise(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    normalization: str,
) -> tuple[torch.Tensor, Statistics]:
    wide = x.to(_compute_dtype(x))
    scale = _scale(gamma, wide.dtype, zero_centered_gamma)
    if normalization == "RMSNorm":
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * inverse_rms * scale).to(x.dtype), (inverse_rms,)
    assert beta is not None
    mean = wide.mean(dim=-1, keepdim=True)
    centered = wide - mean
    inverse_std = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    return (centered * inverse_std * scale + beta.to(wide.dtype)).to(x.dtype), (mean, inverse_std)


def norm_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    statistics: Statistics,
    gamma: torch.Tensor,
    zero_centered_gamma: bool,
    normalization: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns (x gradient, gamma gradient, beta gradient or None) for `norm_forward`."""
    # The second kernel adds up the parts of the parameters' gradients.
    names = (f"te:{normalization.lower()}_backward", "te:norm_backward_finalize")
    reads = (grad_output, x, gamma, *statistics)
    with kernel(names[0], reads=reads) as launch:
        gradients = _norm_gradients(
            grad_output, x, statistics, gamma, zero_centered_gamma, normalization
        )
        launch.writes = gradients
    with kernel(names[1], updates=gradients[1:]):
        pass
    return gradients


def _norm_gradients(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    statistics: Statistics,
    gamma: torch.Tensor,
    zero_centered_gamma: bool,
    normalization: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    wide = x.to(_compute_dtype(x))
    grad = grad_output.to(wide.dtype)
    inverse = statistics[-1]
    normalized = (
        (wide - statistics[0]) * inverse if normalization == "LayerNorm" else wide * inverse
    )
    scaled_grad = grad * _scale(gamma, wide.dtype, zero_centered_gamma)
    projection = (scaled_grad * normalized).mean(dim=-1, keepdim=True)
    centered_grad = scaled_grad - normalized * projection
    if normalization == "LayerNorm":
        centered_grad = centered_grad - scaled_grad.mean(dim=-1, keepdim=True)
    dgamma = (grad * normalized).sum(dim=0).to(gamma.dtype)
    dbeta = grad.sum(dim=0).to(gamma.dtype) if normalization == "LayerNorm" else None
    return (centered_grad * inverse).to(x.dtype), dgamma, dbeta


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, x.dtype)


def _scale(gamma: torch.Tensor, dtype: torch.dtype, zero_centered_gamma: bool) -> torch.Tensor:
    # Added in fp32: in bf16 a small zero-centered gamma would be lost beside the 1.
    return gamma.to(dtype) + 1.0 if zero_centered_gamma else gamma.to(dtype)


class _NormContext(SavedContext):
    norm: "NormModule"
    num_parameters: int


class _Norm(torch.autograd.Function):
    """Takes the parameters only to give them gradients; see [Note: norm weight in backward]."""

    @staticmethod
    def forward(
        ctx: _NormContext | None, inp: torch.Tensor, norm: "NormModule", *parameters: torch.Tensor
    ) -> torch.Tensor:
        weight = require_live(norm.weight, "norm weight in forward")
        features = weight.numel()
        x = inp.contiguous().to(weight.dtype).view(-1, features)
        beta = norm.bias.view(-1) if norm.normalization == "LayerNorm" else None
        out, statistics = norm_forward(
            x, weight.view(-1), beta, norm.eps, norm.zero_centered_gamma, norm.normalization
        )
        if ctx is not None:
            ctx.save_for_backward(x, *statistics)
            ctx.norm = norm
            ctx.num_parameters = len(parameters)
        return out.view(inp.shape)

    @staticmethod
    def backward(ctx: _NormContext, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm = ctx.norm
        x, *statistics = (tensor for tensor in ctx.saved_tensors if tensor is not None)
        weight = require_live(norm.weight, "norm weight in backward")
        grad = grad_output.contiguous().to(weight.dtype).view(x.shape)
        dx, dgamma, dbeta = norm_backward(
            grad,
            x,
            tuple(statistics),
            weight.view(-1),
            norm.zero_centered_gamma,
            norm.normalization,
        )
        gradients = [dgamma.view(weight.shape), None if dbeta is None else dbeta.view(weight.shape)]
        return dx.view(grad_output.shape), None, *gradients[: ctx.num_parameters]


class BasicOperation(torch.nn.Module):
    """Base of operations that TE can fuse; here it only keeps the empty quantization state."""

    def get_extra_state(self) -> torch.Tensor:
        """Returns the empty state of an operation without quantization; the key exists as in TE."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Accepts an empty state.

        Raises:
            NotImplementedError: the checkpoint holds quantization state.
        """
        refuse_if(state is not None and state.numel() > 0, "quantization state in checkpoints")


class NormModule(BasicOperation):
    """Common part of `RMSNorm` and `LayerNorm`: parameter `weight`, for LayerNorm also `bias`."""

    normalization = ""
    bias: Parameter

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        """Allocates the parameters.

        `sequence_parallel` is set as an attribute on the parameters, unless None. `hidden_size` is
        TE's deprecated name of `normalized_shape`. `sm_margin` tunes kernels: no effect here.

        Raises:
            ValueError: neither, or both, of `normalized_shape` and `hidden_size` are given.
        """
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError("Expected either normalized_shape or hidden_size.")
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        given = hidden_size if normalized_shape is None else normalized_shape
        assert given is not None
        shape = tuple(given) if isinstance(given, Iterable) else (given,)
        dtype = params_dtype or dtype or torch.get_default_dtype()
        where = host_device(device)
        self.weight = Parameter(torch.empty(shape, dtype=dtype, device=where))
        if self.normalization == "LayerNorm":
            self.bias = Parameter(torch.empty(shape, dtype=dtype, device=where))
        if where.type != "meta":
            self.reset_parameters()

    def fast_setattr(self, name: str, value: object) -> None:
        """Sets a plain attribute without torch's check for parameters and submodules."""
        self.__dict__[name] = value

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Sets gamma to 1 (0 when zero-centered) and beta to 0, off the `meta` device.

        A no-op when `defer_init`. Attributes set on a parameter survive unless it was on `meta`.
        """
        if defer_init:
            return
        first_values = {"weight": 0.0 if self.zero_centered_gamma else 1.0, "bias": 0.0}
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                parameter = Parameter(torch.empty_like(parameter, device="cpu"))
            torch.nn.init.constant_(parameter, first_values[name])
            setattr(self, name, parameter)
            if self.sequence_parallel is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalises over the trailing dimensions of `inp` that the weight covers.

        Raises:
            ValueError: the trailing dimensions of `inp` are not the weight's shape.
        """
        shape = tuple(self.weight.shape)
        if tuple(inp.shape[-len(shape) :]) != shape:
            raise ValueError(f"Expected trailing dimensions {shape}, got {tuple(inp.shape)}.")
        if torch.is_grad_enabled():
            return _Norm.apply(inp, self, *self.parameters())  # type: ignore[no-any-return]
        return _Norm.forward(None, inp, self, *self.parameters())


class RMSNorm(NormModule):
    """y = x / rms(x) * gamma; with `zero_centered_gamma`, times (1 + gamma)."""

    normalization = "RMSNorm"


class LayerNorm(NormModule):
    """y = (x - mean) / std * gamma + beta; with `zero_centered_gamma`, (1 + gamma)."""

    normalization = "LayerNorm"
