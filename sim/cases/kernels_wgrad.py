"""Small bodies with delayed weight gradients, under real MFSDP units and our hooks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sim.cases import bodies_units as units
from sim.cases.kernels_hooks import hook
from sim.cases.numbers import compare_gradients
from sim.cases.ordering import check_wgrad_start
from sim.cases.worlds import Rank, at_node, run_ranks
from sim.checks import Violation
from sim.te.linear import Linear

if TYPE_CHECKING:
    from real.hooks import UnitScheduler

_NUM_RANKS = 2


def _delayed(*, is_delayed: bool = True) -> Linear:
    return Linear(
        units.WIDTH,
        units.WIDTH,
        bias=False,
        params_dtype=torch.bfloat16,
        delay_wgrad_compute=is_delayed,
    )


class _Layer(nn.Module):
    """A weight with an ordinary gradient, one with a delayed gradient, perhaps an unused one."""

    def __init__(
        self, *, is_delayed: bool = True, num_uses: int = 1, has_unused: bool = False
    ) -> None:
        super().__init__()
        self.norm = units.Part()
        if has_unused:
            self.unused = nn.Parameter(torch.ones(units.WIDTH, dtype=torch.bfloat16))
        self.fc = _delayed(is_delayed=is_delayed)
        self.num_uses = num_uses

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.norm(value)
        for _ in range(self.num_uses):
            value = self.fc(value)
        return value


class _Model(nn.Module):
    """One such layer behind a weight of the root."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = units.Part()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.first(value))
        return output


class _Run:
    """One microbatch through two nodes, `first` and `mlp`, and back."""

    def __init__(
        self,
        rank: Rank,
        layer: nn.Module,
        *,
        is_counted: Callable[[str], bool] = lambda _: True,
        fires: dict[str, int] | None = None,
    ) -> None:
        torch.manual_seed(1)
        self.model = _Model(layer)
        mesh = units.dense_mesh()
        units.shard(layer, mesh)
        units.shard(self.model, mesh)
        self.scheduler: UnitScheduler = hook(self.model, fires=fires, is_counted=is_counted)
        rank.observe(self.model)
        self.rank = rank
        units.begin(0)
        with at_node("first"):
            self.hidden = self.model.first(units.given_to(rank.number, 0))
        self.given = self.hidden.detach().requires_grad_()
        with at_node("mlp", layer="layer"):
            self.output = layer(self.given)
        self.scheduler.release_forward(["layer"], "mlp forward")

    def backward(self) -> None:
        with at_node("mlp", "backward", layer="layer"):
            self.output.backward(torch.ones_like(self.output))

    def backward_dw(self, num_calls: int = 1) -> None:
        fc: Any = self.model.layer.fc
        with at_node("mlp", "wgrad", layer="layer"):
            for _ in range(num_calls):
                fc.backward_dw()

    def finish(self) -> dict[str, torch.Tensor]:
        self.scheduler.release_backward(["layer"], "mlp wgrad")
        with at_node("first", "backward"):
            self.hidden.backward(self.given.grad)
        self.scheduler.finish_grad_sync()
        from real.mcore import internals

        gradients = internals.full_gradients(self.model)
        units.end(0)
        return gradients


def _expected(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the mean gradient of all ranks' data, without FSDP and without delay."""
    torch.manual_seed(1)
    model = _Model(layer)
    for rank in range(_NUM_RANKS):
        model(units.given_to(rank, 0)).sum().backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).float() / _NUM_RANKS
        for name, p in model.named_parameters()
    }


# -- B4 ---------------------------------------------------------------------------------------


def wide_gradient(*, is_unconstrained: bool) -> list[Violation]:
    """A delayed weight gradient comes in float32 for a bf16 weight."""

    def body(rank: Rank) -> None:
        run = _Run(rank, _Layer())
        fc: Any = run.model.layer.fc
        weight = run.scheduler.units["layer"].unit.trainable_parameters["layer.fc.weight"]
        if is_unconstrained:
            weight.grad_dtype = None
        run.backward()
        with at_node("mlp", "wgrad", layer="layer"):
            (gradient, *_), _ = fc.wgrad_store.pop()
            weight.grad = gradient.float()
            for call in fc.wgrad_accumulation_and_reduce_hooks:
                call()
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations()


# -- B5 ---------------------------------------------------------------------------------------


def used_twice(*, is_delayed: bool) -> list[Violation]:
    """A weight that one microbatch uses twice, with its gradients delayed or not."""

    def make() -> _Layer:
        return _Layer(is_delayed=is_delayed, num_uses=2)

    def body(rank: Rank) -> list[Violation]:
        torch.manual_seed(1)
        run = _Run(rank, make(), fires={"layer.fc.weight": 2} if is_delayed else None)
        run.backward()
        if is_delayed:
            run.backward_dw(num_calls=2)
        gradients = run.finish()
        torch.manual_seed(1)
        plain = _Layer(is_delayed=False, num_uses=2)
        return compare_gradients(rank.number, gradients, _expected(plain), ["", "layer"])

    outcome = run_ranks(_NUM_RANKS, body)
    return outcome.violations() + [v for found in outcome.results for v in found]


# -- B7 ---------------------------------------------------------------------------------------


def pending_callback(*, is_counted: bool) -> list[Violation]:
    """The schedule is done with a layer's autograd pass; its delayed gradient is still to come."""

    def body(rank: Rank) -> None:
        run = _Run(
            rank,
            _Layer(has_unused=True),
            is_counted=lambda name: is_counted or not name.endswith("fc.weight"),
        )
        run.backward()
        if not is_counted:
            run.scheduler.release_backward(["layer"], "mlp backward")
        run.backward_dw()
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations()


# -- B8 ---------------------------------------------------------------------------------------


def wgrad_stream(*, is_node_stream: bool) -> list[Violation]:
    """The weight gradient runs on the node's stream, or on another one that nobody joined."""

    def body(rank: Rank) -> None:
        side = torch.cuda.Stream()
        run = _Run(rank, _Layer())
        rank.name(run.given, "layer", "wgrad input")
        rank.name(run.hidden, "layer", "wgrad input")
        run.backward()
        rank.name(_pending_input(run.model.layer.fc), "layer", "wgrad input")
        with torch.cuda.stream(torch.cuda.current_stream() if is_node_stream else side):
            run.backward_dw()
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations()


def _pending_input(fc: Any) -> torch.Tensor:
    tensor: torch.Tensor = fc.wgrad_store.context.queue[0][0][0]
    return tensor


# -- B10 --------------------------------------------------------------------------------------


def wgrad_start(*, waits_for_shared_expert: bool) -> list[Violation]:
    """Routed experts' weight gradient on a stream of its own, beside a shared expert's backward."""

    def body(rank: Rank) -> None:
        wgrad_stream, shared_stream = torch.cuda.Stream(), torch.cuda.Stream()
        run = _Run(rank, _Layer())
        shared = torch.ones(units.WIDTH, units.WIDTH)
        run.backward()
        current = torch.cuda.current_stream()
        wgrad_stream.wait_stream(current)
        shared_stream.wait_stream(current)
        with at_node("shared_expert", "backward", layer="layer"), torch.cuda.stream(shared_stream):
            shared = shared @ shared
        if waits_for_shared_expert:
            wgrad_stream.wait_stream(shared_stream)
        # The reduction that the hook launches belongs to the stream that made the gradient.
        with torch.cuda.stream(wgrad_stream):
            run.backward_dw()
        current.wait_stream(wgrad_stream)
        current.wait_stream(shared_stream)
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations(check_wgrad_start)


# -- B13 --------------------------------------------------------------------------------------


def hook_thread(*, is_own_thread: bool) -> list[Violation]:
    """The weight gradient and its hook run in the rank's thread, or in another one."""

    def body(rank: Rank) -> None:
        run = _Run(rank, _Layer())
        run.backward()
        if is_own_thread:
            run.backward_dw()
        else:
            fc: Any = run.model.layer.fc
            with ThreadPoolExecutor(max_workers=1) as pool:
                pool.submit(fc.backward_dw).result()
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations()
