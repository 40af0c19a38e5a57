"""Two fused paths that write the gradient of one weight, under real MFSDP units and our hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sim.cases import bodies_units as units
from sim.cases.kernels_hooks import hook
from sim.cases.numbers import compare_gradients
from sim.cases.worlds import Rank, at_node, run_ranks
from sim.checks import Violation

_NUM_RANKS = 2


class _FusedLinear(torch.autograd.Function):
    """Writes its weight gradient straight into a buffer, as a fused kernel does."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor,
        buffer: torch.Tensor,
        accumulates: Callable[[], bool],
    ) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.buffer, ctx.accumulates = buffer, accumulates
        return value @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        value, weight = ctx.saved_tensors
        wgrad = gradient.t() @ value
        if ctx.accumulates():
            ctx.buffer.add_(wgrad)
        else:
            ctx.buffer.copy_(wgrad)
        return gradient @ weight, None, None, None


class _FusedOutput(nn.Linear):
    """A projection that calls the hooks of its weight's gradient itself."""

    def __init__(self) -> None:
        super().__init__(units.WIDTH, units.WIDTH, bias=False, dtype=torch.bfloat16)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)


class _Head(nn.Module):
    """A projection that the main output and the prediction layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = units.Part()
        self.output = _FusedOutput()


def fused_paths(*, knows_first_path: bool) -> list[Violation]:
    """Two nodes write the gradient of one weight into the reduction's input.

    Args:
        knows_first_path: Only the first path of a microbatch overwrites what is in the buffer;
            otherwise every path does that in the first microbatch.
    """

    def body(rank: Rank) -> list[Violation]:
        torch.manual_seed(1)
        model = _Head()
        plain = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
        units.shard(model, units.dense_mesh())
        scheduler = hook(model, fires={"output.weight": 2})
        rank.observe(model)
        weight = scheduler.units[""].unit.trainable_parameters["output.weight"]
        buffer = torch.zeros(units.WIDTH, units.WIDTH, dtype=torch.bfloat16)
        num_paths = 0

        def accumulates() -> bool:
            nonlocal num_paths
            num_paths += 1
            return knows_first_path and num_paths > 1

        units.begin(0)
        with at_node("pre_process"):
            hidden = model.embedding(units.given_to(rank.number, 0))
        outputs = []
        for node in ("mtp_post_process", "post_process"):
            with at_node(node):
                given = hidden.detach().requires_grad_()
                scheduler.pre_forward("", "output")
                outputs.append((node, given, _fused(given, weight, buffer, accumulates)))
        for node, _, output in reversed(outputs):
            with at_node(node, "backward"):
                scheduler.pre_backward("", "output")
                output.backward(torch.ones_like(output))
                weight.grad = buffer
                for call in model.output.wgrad_accumulation_and_reduce_hooks:
                    call()
        with at_node("pre_process", "backward"):
            hidden.backward(outputs[0][1].grad + outputs[1][1].grad)
        scheduler.finish_grad_sync()
        from real.mcore import internals

        gradients = internals.full_gradients(model)
        units.end(0)
        for other in range(_NUM_RANKS):
            value = nn.functional.linear(units.given_to(other, 0), plain[0])
            (2 * nn.functional.linear(value, plain[1])).sum().backward()
        names = ("embedding.weight", "output.weight")
        expected = {
            name: p.grad.float() / _NUM_RANKS
            for name, p in zip(names, plain, strict=True)
            if p.grad is not None
        }
        return compare_gradients(rank.number, gradients, expected, [""])

    outcome = run_ranks(_NUM_RANKS, body)
    return outcome.violations() + [v for found in outcome.results for v in found]


def _fused(*arguments: Any) -> torch.Tensor:
    output: torch.Tensor = _FusedLinear.apply(*arguments)
    return output
