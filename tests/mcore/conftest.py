"""Megatron on fake ranks, for tests that look inside one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from real.config import Scenario
from real.trace import MemorySink, Recorder, recording
from sim.cuda import FakeDevice, use_device
from sim.quiet import quiet
from sim.session.megatron import megatron_on_fake_cuda, rank_state
from sim.world import World, init_process_group

Records = list[dict[str, Any]]
HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    """Megatron is importable and torch.cuda is fake for all tests of a file."""
    with warnings.catch_warnings():
        quiet()
        with megatron_on_fake_cuda():
            yield


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Megatron warns of options that it sets itself; the command line hides that too."""
    with warnings.catch_warnings():
        quiet()
        yield


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """Runs `body(rank, records)` on every rank of a scenario, model parallel groups initialized.

    `records` grows while the rank runs.
    """

    def run(scenario: Scenario, body: Callable[[int, Records], Any]) -> list[Any]:
        from real.mcore.model import initialize_parallel
        from real.mcore.observe import recorded_nodes

        def on_rank(rank: int) -> object:
            sink = MemorySink()
            recorder = Recorder(sink)
            with use_device(FakeDevice(rank, recorder)), recording(recorder):
                init_process_group(rank, scenario.world_size)
                initialize_parallel(scenario)
                return body(rank, sink.records)

        with recorded_nodes():
            return World(scenario.world_size, state=rank_state()).run(on_rank)

    return run


def _hooks_on(root: nn.Module) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, module in root.named_modules():
        for dictionary in HOOK_DICTIONARIES:
            found[f"{name}.{dictionary}"] = list(getattr(module, dictionary).items())
        for group in getattr(module, "_parameter_groups", ()):
            for local, parameter in zip(
                group.parameter_names, group.unsharded_parameters, strict=True
            ):
                hooks = parameter._post_accumulate_grad_hooks or {}
                found[f"{name}.{local}"] = list(hooks.items())
    return {place: hooks for place, hooks in found.items() if hooks}


@pytest.fixture
def hooks_on() -> Callable[[nn.Module], dict[str, list[Any]]]:
    """Returns every hook on a sharded model with its key, in order, by where it is."""
    return _hooks_on
