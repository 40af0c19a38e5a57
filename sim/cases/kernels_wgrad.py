"""Small bodies with delayed weight gradients, under real MFSDP units and our hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from real.trace import OpKind, Trace
from sim.cases import bodies_units as units
from sim.cases.kernels_hooks import hook
from sim.cases.numbers import compare_gradients
from sim.cases.ordering import OVERLAP
from sim.cases.worlds import Rank, at_node, run_ranks
from sim.checks import Access, Violation
from sim.checks.base import walk
from sim.checks.clocks import StreamClocks
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


def check_wgrad_start(traces: Sequence[Trace]) -> list[Violation]:
    """A weight gradient waits for nothing that the end of its input gradient had not waited for.

    Then it can start where the input gradient ends; with another wait it can be held back.
    """
    found = []
    for trace in traces:
        clocks = StreamClocks()
        layer_ends: dict[str, tuple[int, dict[int, int]]] = {}
        started: set[str] = set()
        for record, place in walk(trace.records):
            is_kernel = record["op"] == OpKind.KERNEL
            name, _, layer = str(place.node).partition(" of ")
            if is_kernel and name.endswith(" wgrad") and layer in layer_ends:
                stream = record["stream"]
                dgrad_stream, known = layer_ends[layer]
                for other, seq in clocks.clock(stream).items():
                    if other in (stream, dgrad_stream) or seq <= known.get(other, -1):
                        continue
                    if layer not in started:
                        found.append(_held_back(trace, record, place.microbatch, layer, other, seq))
                started.add(layer)
            clocks.advance(record)
            if is_kernel and name == "mlp backward":
                layer_ends[layer] = (record["stream"], dict(clocks.clock(record["stream"])))
    return found


def _held_back(
    trace: Trace, record: dict[str, Any], microbatch: int | None, layer: str, other: int, seq: int
) -> Violation:
    return Violation(
        rule=OVERLAP,
        rank=trace.rank,
        message=f"The weight gradient of {layer} waits for stream {other}, which its input "
        "gradient does not need.",
        unit=layer,
        node=f"mlp wgrad of {layer}",
        microbatch=microbatch,
        first=Access(seq, other, "newest work waited for"),
        second=Access(record["seq"], record["stream"], f"{record['name']} starts"),
        seq=record["seq"],
    )


# -- B12 --------------------------------------------------------------------------------------


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
    output: torch.Tensor = _FusedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


# -- B13 --------------------------------------------------------------------------------------


def hook_thread(*, is_own_thread: bool) -> list[Violation]:
    """The weight gradient and its hook run in the rank's thread, or in another one."""

    def body(rank: Rank) -> None:
        run = _Run(rank, _Layer())
        run.backward()
        if is_own_thread:
            run.backward_dw()
        else:
            with ThreadPoolExecutor(max_workers=1) as pool:
                pool.submit(run.model.layer.fc.backward_dw).result()  # type: ignore[union-attr]
        run.finish()

    return run_ranks(_NUM_RANKS, body).violations()
