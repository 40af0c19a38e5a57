"""Worlds and devices for the tests of the fake runtime."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from real.trace import MemorySink, Recorder
from sim.cuda import FakeDevice, fake_cuda, use_device
from sim.world import World, init_process_group

Records = list[dict[str, Any]]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A fake device in use in this thread, without a sink."""
    with fake_cuda(), use_device(FakeDevice(0, Recorder())) as fake:
        yield fake


@pytest.fixture
def records() -> Iterator[Records]:
    """The records of a fake device in use in this thread, from after its first stream."""
    sink = MemorySink()
    device = FakeDevice(0, Recorder(sink))
    sink.records.clear()
    with fake_cuda(), use_device(device):
        yield sink.records


@pytest.fixture
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Runs `body(rank)` on ranks that have torch.distributed and a fake device each."""
    with fake_cuda():
        yield _run_ranks


def _run_ranks(
    num_ranks: int,
    body: Callable[[int], Any],
    *,
    sinks: list[MemorySink] | None = None,
    **options: Any,
) -> list[Any]:
    def run(rank: int) -> Any:
        recorder = Recorder(sinks[rank] if sinks else None)
        with use_device(FakeDevice(rank, recorder)):
            init_process_group(rank, num_ranks)
            return body(rank)

    return World(num_ranks, **options).run(run)
