"""Cases of group G: the order of collectives, and deadlocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from sim.cases import bodies_streams as streams
from sim.cases import bodies_units as units
from sim.cases.base import Case, Run, Shown
from sim.cases.judges import both_sides
from sim.cases.judges_overlap import check_queued
from sim.cases.ordering import OVERLAP
from sim.cases.worlds import Defect, Rank, all_of, replaced, run_ranks
from sim.checks import Violation


class _Multimodal(nn.Module):
    """Text always, an image on some ranks.

    Args:
        always: Whether the vision part runs without an image too, on an empty tensor.
    """

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always
        self.vision = units.Layer()
        self.text = units.Layer()

    def forward(self, value: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        if image is None and self.always:
            image = value.new_zeros(0, units.WIDTH)
        if image is not None:
            value = value + self.vision(image).sum()
        output: torch.Tensor = self.text(value)
        return output


def _image_on_one_rank(*, always: bool) -> Callable[[Rank], None]:
    """A step under MFSDP's own hooks where only rank 0 has an image."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        model: Any = _Multimodal(always=always)
        mesh = units.dense_mesh()
        for part in (model.vision, model.text, model):
            units.shard(part, mesh)
        model._lazy_init_context()
        rank.observe(model)
        units.begin(0)
        value = units.given_to(rank.number, 0).requires_grad_()
        image = units.given_to(rank.number, 1) if rank.number == 0 else None
        model(value, image).sum().backward()
        units.end(0)

    return body


def _tokens_for_some(rank: Rank) -> None:
    """A step in which one layer of rank 0 gets no tokens: its weights have no gradient."""
    torch.manual_seed(1)
    chunk = units.Chunk()
    for name in ("attn", "mlp"):
        part: Any = chunk.get_submodule(f"decoder.layers.1.{name}")
        part.is_idle = rank.number == 0
    units.start(rank, chunk).step(0)


def _no_gradient_no_reduction() -> AbstractContextManager[None]:
    unused: set[Any] = set()

    def make_fill(original: Any) -> Any:
        def fill(scheduler: Any, unit: Any, cause: str) -> None:
            if len(unit.countdown.missing()) == len(unit.unit.trainable_parameters):
                unused.add(unit)
            original(scheduler, unit, cause)

        return fill

    def make(original: Any) -> Any:
        def finish(scheduler: Any, unit: Any, cause: str) -> None:
            if unit in unused:
                unused.remove(unit)
                for parameter in unit.unit.trainable_parameters.values():
                    parameter.grad = None
                scheduler._close_backward(unit, cause)
            else:
                original(scheduler, unit, cause)

        return finish

    scheduler = "real.hooks.scheduler.UnitScheduler"
    return all_of(
        replaced(f"{scheduler}._zero_fill", make_fill),
        replaced(f"{scheduler}._finish_backward", make),
    )


def _gathered_ahead(*, is_ordered: bool) -> Callable[[Rank], None]:
    """Both ranks gather a frozen layer and a trainable one ahead, equally often.

    Args:
        is_ordered: Whether in one order on all ranks; else in the order of a set of objects.
    """

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunk = units.Chunk()
        chunk.get_submodule("decoder.layers.1").requires_grad_(False)
        kernel = units.start(rank, chunk)
        names = ["decoder.layers.0", "decoder.layers.1"]
        if not is_ordered and rank.number == 1:
            names.reverse()
        for name in names:
            kernel.model.unshard(name)
        for name in names:
            kernel.model.reshard(name)
        kernel.step(0)

    return body


def _ranks(body: Callable[[Rank], Any], defect: Defect = nullcontext) -> Run:
    def run() -> list[Violation]:
        with defect():
            outcome = run_ranks(2, body)
        return outcome.violations() + both_sides(outcome)

    return run


def _queued(**shared: bool) -> Run:
    def run() -> list[Violation]:
        outcome = run_ranks(2, lambda rank: streams.gather_after_reduction(rank, **shared))
        return outcome.violations() + check_queued(outcome.traces)

    return run


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="G1",
        source="https://github.com/pytorch/torchtitan/pull/4777",
        title="A rank without an image does not run the vision unit, and the others wait.",
        rules=("I11", "I12"),
        unit="vision",
        shown=Shown.KERNEL,
        defect="the vision unit runs where there is an image",
        twin="it runs everywhere, on an empty tensor",
        faulty=_ranks(_image_on_one_rank(always=False), units.attributed),
        correct=_ranks(_image_on_one_rank(always=True), units.attributed),
    ),
    Case(
        id="G3",
        source="https://github.com/NVIDIA/Megatron-LM/issues/5749",
        title="Deadlock with expert parallelism: ranks do not take part in the same reductions.",
        rules=("I11", "I12"),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="a unit without tokens has no gradient and is not reduced",
        twin="it reduces zeros",
        faulty=_ranks(_tokens_for_some, _no_gradient_no_reduction),
        correct=_ranks(_tokens_for_some),
    ),
    Case(
        id="G5",
        source="ezpz#240",
        title="A hang with a frozen unit although every rank makes as many calls.",
        rules=("I11",),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="equal counts, another order on one rank",
        twin="one order on all ranks",
        faulty=_ranks(_gathered_ahead(is_ordered=False)),
        correct=_ranks(_gathered_ahead(is_ordered=True)),
    ),
    Case(
        id="G7",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6484",
        title="A gather waits for a reduction on the same communicator, whatever its stream.",
        rules=(OVERLAP,),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="one communicator, which runs its calls in launch order",
        twin="a communicator for each kind",
        faulty=_queued(shares_group=True),
        correct=_queued(),
    ),
    Case(
        id="G8",
        source="https://github.com/pytorch/pytorch/issues/64803",
        title="A reduction holds up the next gather on the stream that they share.",
        rules=(OVERLAP,),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="one stream",
        twin="a stream for each kind",
        faulty=_queued(shares_stream=True),
        correct=_queued(),
    ),
)
