"""Cases of group F: ownership, experts, shared weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from sim.cases import bodies_units as units
from sim.cases.base import Case, Run, Shown
from sim.cases.judges import check_demand, check_norms
from sim.cases.judges_memory import check_reduce_inputs
from sim.cases.worlds import (
    SMALL,
    Defect,
    Rank,
    clean,
    reference,
    replaced,
    run_ranks,
    run_scenario,
    train,
)
from sim.checks import Violation

_TIED: Final = SMALL.changed(untie_embeddings_and_output_weights=False)


def _no_divisor() -> AbstractContextManager[None]:
    return replaced("torch._foreach_div_", lambda _: lambda tensors, divisor: None)


def _experts_on_the_dense_mesh() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def meshes(**keys: Any) -> Any:
            made = original(**keys)
            return dataclasses.replace(made, expert=made.dense)

        return meshes

    return replaced("real.mcore.jobs.make_meshes", make)


def _norm_without_experts() -> AbstractContextManager[None]:
    """The norm takes all gradients as those of the dense mesh."""

    def make(original: Any) -> Any:
        def norm(root: nn.Module, *, expert_units: Any, expert_group: Any) -> torch.Tensor:
            total: torch.Tensor = original(
                root, expert_units=frozenset(), expert_group=expert_group
            )
            return total

        return norm

    return replaced("real.mcore.clip.grad_norm", make)


def _norms(defect: Defect = nullcontext) -> list[Violation]:
    outcome = train(SMALL, defect=defect)
    return outcome.violations() + check_norms(outcome.results, reference(SMALL))


def _owner_updated_late() -> AbstractContextManager[None]:
    """A unit's own parameters are taken as those of the unit around it."""

    def make(_: Any) -> Any:
        from real.hooks.owner import OwnedModule

        def visit(
            module: nn.Module,
            name: str,
            owner: str,
            is_unit: Callable[[nn.Module], bool],
            seen: set[nn.Module],
        ) -> Iterator[Any]:
            if any(True for _ in module.parameters(recurse=False)):
                yield OwnedModule(name, module, owner)
            owner = name if is_unit(module) else owner
            for child_name, child in module.named_children():
                full_name = f"{name}.{child_name}" if name else child_name
                yield from visit(child, full_name, owner, is_unit, seen)

        return visit

    return replaced("real.hooks.owner._visit", make)


def _nested_experts(defect: Defect = nullcontext) -> list[Violation]:
    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        units.start(rank, units.Chunk(has_experts=True)).step(0)

    with defect():
        outcome = run_ranks(2, body)
    return outcome.violations() + check_demand(outcome.traces)


def _two_chunks(*, shares_context: bool) -> Run:
    """Two chunks of one model, finalised once through the first of them."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunks = [
            units.Chunk(1, first_layer=first, has_embedding=False, has_output=False)
            for first in (0, 1)
        ]
        kernels = units.start_all(rank, chunks, shares_context=shares_context)
        units.begin(0)
        for kernel in kernels:
            kernel.forward(0)
        for kernel in reversed(kernels):
            kernel.backward(0)
        kernels[0].model.finish_grad_sync()
        units.read_gradients()
        units.end(0)

    return lambda: run_ranks(2, body).violations()


def _tied_by_object() -> AbstractContextManager[None]:
    """The output layer has the embedding's weight as a parameter of its own: one, two names."""

    def make(original: Any) -> Any:
        def build(config: Any, scenario: Any) -> Any:
            model = original(config, scenario)
            model.output_layer.weight = model.embedding.word_embeddings.weight
            return model

        return build

    return replaced("real.mcore.jobs.build_model", make)


def _large_vocabulary(*, is_split: bool) -> list[Violation]:
    """A chunk whose embedding and output projection outweigh its layers.

    Args:
        is_split: Whether each is a unit of its own; else the root owns both.
    """

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunk: Any = units.Chunk()
        chunk.embedding, chunk.output = units.Vocabulary(), units.Vocabulary()
        if is_split:
            mesh = units.dense_mesh()
            units.shard(chunk.embedding, mesh)
            units.shard(chunk.output, mesh)
        units.start(rank, chunk).step(0)

    outcome = run_ranks(2, body)
    return outcome.violations() + check_reduce_inputs(outcome.traces)


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="F1",
        source="https://github.com/NVIDIA/Megatron-LM/pull/5956",
        title="Expert gradients are too large by the expert-parallel size.",
        rules=("I14",),
        unit="decoder.layers.0.mlp.experts",
        shown=Shown.SCENARIO,
        defect="the divisor of expert gradients is missing",
        twin="they are divided by the expert-parallel size",
        faulty=lambda: run_scenario(SMALL, defect=_no_divisor),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="F2",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6450",
        title="Experts are claimed by the dense mesh.",
        rules=("I15",),
        unit="decoder.layers.0.mlp.experts",
        shown=Shown.SCENARIO,
        defect="experts are sharded over all data-parallel ranks",
        twin="they are sharded over the ranks that hold the same ones",
        faulty=lambda: run_scenario(SMALL, defect=_experts_on_the_dense_mesh),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="F3",
        source="https://github.com/NVIDIA/Megatron-LM/pull/5954",
        title="The gradient norm does not take mixed meshes.",
        rules=("I14",),
        unit=None,
        shown=Shown.SCENARIO,
        defect="experts are summed over the dense mesh's ranks only",
        twin="each kind is summed over its own ranks",
        faulty=lambda: _norms(_norm_without_experts),
        correct=lambda: _norms(),
    ),
    Case(
        id="F4",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6484",
        title="A unit's own parameters gather the unit around it.",
        rules=("I15",),
        unit="decoder.layers.0.experts",
        shown=Shown.KERNEL,
        defect="the owner is updated after a module's own parameters are looked at",
        twin="it is updated before",
        faulty=lambda: _nested_experts(_owner_updated_late),
        correct=lambda: _nested_experts(),
    ),
    Case(
        id="F6",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6486",
        title="One context per chunk: streams that no single final wait knows of.",
        rules=("I8",),
        unit="decoder.layers.1",
        shown=Shown.KERNEL,
        defect="each chunk has its own context; the model is finalised once",
        twin="one context for all chunks",
        faulty=_two_chunks(shares_context=False),
        correct=_two_chunks(shares_context=True),
    ),
    Case(
        id="F7",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6164",
        title="A tied weight counts once for each of its names.",
        rules=("I15",),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="the output layer registers the embedding's weight under a second name",
        twin="it borrows the weight and owns none",
        faulty=lambda: run_scenario(_TIED, defect=_tied_by_object),
        correct=lambda: list(clean(_TIED)),
    ),
    Case(
        id="F11",
        source="NeMo Automodel#3703",
        title="Untied embeddings make one huge reduce input of the root.",
        rules=("I20",),
        unit="<root>",
        shown=Shown.KERNEL,
        defect="the root owns embedding and output projection",
        twin="each is a unit of its own",
        faulty=lambda: _large_vocabulary(is_split=False),
        correct=lambda: _large_vocabulary(is_split=True),
    ),
)
