"""Fakes that write down, in one list of short strings, what the hooks make units and streams do.

`U+ a` and `U- a` unshard and reshard unit a, `RS a` reduces it, `x<-y` makes stream x wait for
stream y, and `x<-a` makes it wait for the gather of unit a.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from pytest_mock import MockerFixture
from torch import nn

from real.hooks import Prefetch, ScheduledUnit, UnitScheduler


class FakeStream:
    """A stream that writes down what it waits for."""

    def __init__(self, name: str, stream_id: int, log: list[str]) -> None:
        self.name = name
        self.stream_id = stream_id
        self._log = log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name}<-{other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append(f"{self.name}<-{event.unit}")


class FakeEvent:
    """Stands for the end of one unit's gather."""

    def __init__(self, unit: str) -> None:
        self.unit = unit


class FakeContext:
    """`real.hooks.FsdpContext` with fake streams."""

    def __init__(self, log: list[str]) -> None:
        self.all_gather_stream = FakeStream("ag", 7, log)
        self.reduce_scatter_stream = FakeStream("rs", 8, log)
        self.is_last_microbatch = True


class FakeUnit:
    """`real.hooks.FsdpUnit` that writes down its calls; the root is written `root`."""

    def __init__(self, name: str, parameters: Sequence[str], log: list[str]) -> None:
        self.name = name
        self.module = nn.Identity()
        self.trainable_parameters = {p: nn.Parameter(torch.ones(2)) for p in parameters}
        self.unshard_event: FakeEvent | None = None
        self.reduced: list[dict[str, list[float]]] = []
        self._label = name or "root"
        self._log = log

    def unshard(self) -> None:
        if self.unshard_event is not None:
            return
        self._log.append(f"U+ {self._label}")
        self.unshard_event = FakeEvent(self._label)

    def reshard(self) -> None:
        self._log.append(f"U- {self._label}")
        self.unshard_event = None

    def reduce_gradients(self) -> None:
        """Takes the gradients, as a reduction does."""
        self._log.append(f"RS {self._label}")
        taken = {}
        for name, parameter in self.trainable_parameters.items():
            assert parameter.grad is not None, f"{name} is reduced without a gradient"
            taken[name] = parameter.grad.tolist()
            parameter.grad = None
        self.reduced.append(taken)


class Bench:
    """Makes schedulers of fake units and keeps what they did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = {
            "compute": FakeStream("compute", 0, self.log),
            "comm": FakeStream("comm", 1, self.log),
        }
        self.current = self.streams["compute"]
        self.context = FakeContext(self.log)
        self.units: dict[str, FakeUnit] = {}

    def scheduler(
        self,
        parameters: Mapping[str, Sequence[str]],
        *,
        fires: Mapping[str, int] | None = None,
        divisors: Mapping[str, int] | None = None,
        prefetch: str = "none",
        fence_owner: str | None = "the test",
        delayed: Sequence[str] = (),
    ) -> UnitScheduler:
        """Makes a scheduler of units, given the parameters of each by name, in forward order.

        The schedule releases every unit but the root.
        """
        self.units = {name: FakeUnit(name, names, self.log) for name, names in parameters.items()}
        scheduled = {
            name: ScheduledUnit(
                unit,
                fires={p: (fires or {}).get(p, 1) for p in unit.trainable_parameters},
                is_released_by_schedule=bool(name),
                grad_divisor=(divisors or {}).get(name, 1),
                delayed=[p for p in unit.trainable_parameters if p in delayed],
            )
            for name, unit in self.units.items()
        }
        return UnitScheduler(
            self.context,
            scheduled,
            prefetch=Prefetch(prefetch),
            forward_order=[name for name in parameters if name],
            fence_owner=fence_owner,
        )

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Makes another stream the current one."""
        previous, self.current = self.current, self.streams[stream]
        try:
            yield
        finally:
            self.current = previous

    def take(self) -> list[str]:
        """Returns what was done since the last call."""
        done = list(self.log)
        self.log.clear()
        return done

    def accumulate(self, scheduler: UnitScheduler, unit: str, *parameters: str) -> None:
        """Gives parameters a gradient of ones and runs their completion hooks."""
        for parameter in parameters:
            weight = self.units[unit].trainable_parameters[parameter]
            weight.grad = torch.ones(2) if weight.grad is None else weight.grad + 1
            scheduler.post_gradient(unit, parameter)

    def phases(self, scheduler: UnitScheduler) -> dict[str, str]:
        """Returns the phase of every unit."""
        return {name: unit.lifecycle.phase.value for name, unit in scheduler.units.items()}


@pytest.fixture
def bench(mocker: MockerFixture) -> Bench:
    """Fake units and streams; `torch.cuda.current_stream` is the bench's current one."""
    made = Bench()

    def current_stream(device: object = None) -> FakeStream:
        return made.current

    mocker.patch("torch.cuda.current_stream", current_stream)
    return made
