"""A unit that gets no gradient at all on some ranks: its collectives stay in one place."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from pytest_mock import MockerFixture

from real.config import Scenario
from real.trace import MemorySink
from sim.quiet import quiet
from sim.session.megatron import megatron_on_fake_cuda
from sim.session.run import run_in_process
from sim.world import WorldError

SMALL: Final = Scenario(num_layers=3, num_microbatches=3, train_iters=1)
EXPERTS: Final = "decoder.layers.1.mlp.experts"

Forward = Callable[..., Any]


def full_parameters(module: Any) -> list[torch.nn.Parameter]:  # noqa: ANN401 - MFSDP's mixin
    groups = getattr(module, "_parameter_groups", None)
    if groups is None:
        return list(module.parameters())
    return [p for group in groups for p in group.unsharded_parameters]


def unread(module: Any, forward: Forward) -> Forward:  # noqa: ANN401
    """Computes without asking for a weight's gradient; the unit still runs backward."""

    def run(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        for parameter in full_parameters(module):
            parameter.requires_grad_(False)
        output = forward(value, *args, **kwargs)
        for parameter in full_parameters(module):
            parameter.requires_grad_(True)
        return output

    return run


def unreached(module: Any, forward: Forward) -> Forward:  # noqa: ANN401
    """Computes outside autograd: nothing of the unit runs backward."""

    def run(value: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:  # noqa: ANN401
        with torch.no_grad():
            output, bias = forward(value, counts, probs)
        return output + 0.0 * value + 0.0 * probs.sum(), bias

    return run


def in_turn(rest: Forward, busy: Forward, is_idle: Callable[[int], bool], every: int) -> Forward:
    """Rests in the first call and in every so many after it."""
    calls = itertools.count()

    def forward(*args: object) -> Any:  # noqa: ANN401
        is_resting = next(calls) % every == 0 and is_idle(torch.distributed.get_rank())
        return (rest if is_resting else busy)(*args)

    return forward


def on_some(
    idle: Callable[[Any, Forward], Forward],
    *,
    is_idle: Callable[[int], bool] = lambda rank: rank == 0,
    every: int = 2,
) -> Callable[[Any], Any]:
    """Wraps a builder: the experts of one layer are idle in some calls, on some ranks."""

    def make(build: Any) -> Any:  # noqa: ANN401 - Megatron's builder
        def build_more(config: Any, scenario: Scenario) -> Any:  # noqa: ANN401
            model = build(config, scenario)
            module = model.get_submodule(EXPERTS)
            rest = idle(module, module.forward)
            module.forward = in_turn(rest, module.forward, is_idle, every)
            return model

        return build_more

    return make


def problems_of(scenario: Scenario, make: Callable[[Any], Any], mocker: MockerFixture) -> list[str]:
    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with warnings.catch_warnings():
        quiet()
        with megatron_on_fake_cuda():
            from real.mcore import jobs

            mocker.patch.object(jobs, "build_model", make(jobs.build_model))
            result = run_in_process(scenario, sinks=sinks)
    return list(result.problems())


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["none", "both"])
@pytest.mark.parametrize("idle", [unread, unreached])
def test_idle_experts_are_reduced_where_busy_ones_are(
    idle: Callable[[Any, Forward], Forward], prefetch: str, mocker: MockerFixture
) -> None:
    """Experts of rank 0 rest in the first and third microbatch; those of rank 2 never do."""
    scenario = SMALL.changed(prefetch=prefetch)
    assert problems_of(scenario, on_some(idle), mocker) == []


@pytest.mark.slow
def test_ranks_hang_when_nobody_hears_of_the_node(mocker: MockerFixture) -> None:
    """The layer's release is too late: the next microbatch's experts are gathered before it."""
    with megatron_on_fake_cuda():
        from real.mcore.schedule import Mfsdp1F1B

        mocker.patch.object(Mfsdp1F1B, "post_backward_node")
    with pytest.raises(WorldError, match=r"decoder\.layers\.1\.mlp\.experts"):
        problems_of(SMALL, on_some(unread), mocker)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("idle", [unread, unreached])
def test_the_plain_schedule_reduces_idle_experts_in_place_too(
    idle: Callable[[Any, Forward], Forward], recompute: str, mocker: MockerFixture
) -> None:
    """There one autograd pass runs everything, and nobody says where a unit ends."""
    scenario = SMALL.changed(
        overlap_moe_expert_parallel_comm=False,
        fine_grained_hooks=True,
        recompute_granularity=None if recompute == "none" else recompute,
    )
    # A recomputed forward is a call of its own and has to rest as the first one did.
    make = on_some(idle, every=2 if recompute == "none" else 1)
    assert problems_of(scenario, make, mocker) == []
