"""What a watched unit records, and that nothing is asked of it when nobody records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from real.trace import MemorySink, OpKind, Recorder, active_recorder, recording
from real.watch import (
    Call,
    UnitView,
    fence_point,
    gradient_read_point,
    optimizer_point,
    reduce_point,
    reshard_point,
    unshard_point,
    watched,
)


class Unit:
    """A unit of a tree of its own; each of its calls launches one collective."""

    def __init__(self, name: str, inner: Unit | None = None) -> None:
        self.name = name
        self.inner = inner
        self.is_there = False
        self.has_gradient = {"weight": True, "bias": False}

    def gather(self) -> None:
        if self.inner is not None:
            self.inner.gather()
        self.is_there = True
        active_recorder().record(OpKind.COLLECTIVE, unit=active_recorder().unit)

    def release(self) -> None:
        if not self.is_there:
            raise RuntimeError("released twice")
        self.is_there = False

    def scatter(self) -> None:
        active_recorder().record(OpKind.COLLECTIVE, unit=active_recorder().unit)

    def wait(self) -> None:
        active_recorder().record(OpKind.COLLECTIVE_WAIT)


def _ask_name(unit: Unit) -> str:
    return unit.name


VIEW = UnitView(
    name=_ask_name,
    is_gathered=lambda unit: unit.is_there,
    is_last_microbatch=lambda unit: False,
    gradients=lambda unit: unit.has_gradient,
    version=lambda unit: 7,
    num_zero_filled=lambda unit: 1,
)


@pytest.fixture(autouse=True)
def _stream(mocker: MockerFixture) -> None:
    mocker.patch("torch.cuda.current_stream", return_value=SimpleNamespace(stream_id=3))


@pytest.fixture
def points() -> Iterator[None]:
    """Watches `Unit` for the length of a test."""
    with watched(
        [
            unshard_point(Unit, "gather", VIEW),
            reshard_point(Unit, "release", VIEW),
            reduce_point(Unit, "scatter", VIEW),
            fence_point(Unit, "wait"),
        ]
    ):
        yield


def _records(*calls: Callable[[], None]) -> list[dict[str, Any]]:
    sink = MemorySink()
    with recording(Recorder(sink)):
        for call in calls:
            call()
    return [{k: v for k, v in record.items() if k != "seq"} for record in sink.records]


@pytest.mark.usefixtures("points")
def test_an_unshard_says_whether_the_unit_was_sharded() -> None:
    unit = Unit("a")
    assert _records(unit.gather, unit.gather) == [
        {"op": "collective", "unit": "a"},
        {"op": "weight_version", "unit": "a", "version": 7},
        {"op": "unshard", "unit": "a", "stream": 3, "gathered": True},
        {"op": "collective", "unit": "a"},
        {"op": "unshard", "unit": "a", "stream": 3, "gathered": False},
    ]


@pytest.mark.usefixtures("points")
def test_a_reduction_and_a_release_come_before_their_calls_and_a_fence_after() -> None:
    unit = Unit("a")
    unit.is_there = True
    assert _records(unit.scatter, unit.release, unit.wait) == [
        {"op": "reduce", "unit": "a", "stream": 3, "last": False, "zero_filled": 1},
        {"op": "gradients", "unit": "a", "present": ["weight"], "missing": ["bias"]},
        {"op": "collective", "unit": "a"},
        {"op": "reshard", "unit": "a", "stream": 3},
        {"op": "collective_wait"},
        {"op": "fence", "stream": 3},
    ]


@pytest.mark.usefixtures("points")
def test_collectives_are_of_the_innermost_unit_and_of_none_after_an_error() -> None:
    outer = Unit("outer", Unit("inner"))
    with recording(Recorder(sink := MemorySink())) as recorder:
        outer.gather()
        assert [r["unit"] for r in sink.records if r["op"] == "collective"] == ["inner", "outer"]
        with pytest.raises(RuntimeError, match="twice"):
            Unit("b").release()
        assert recorder.unit is None


def test_nothing_is_asked_when_nobody_records(mocker: MockerFixture) -> None:
    stream = mocker.patch("torch.cuda.current_stream")
    ask = mocker.Mock()
    asked = UnitView(name=ask, is_gathered=ask, gradients=ask, version=ask)
    unit = Unit("a")
    points = [
        unshard_point(Unit, "gather", asked, unit_of=ask),
        reduce_point(Unit, "scatter", asked, unit_of=ask),
        fence_point(Unit, "wait"),
    ]
    with watched(points), recording(Recorder()) as recorder:
        for call in (unit.gather, unit.scatter, unit.wait):
            call()
    assert not recorder.is_recording
    assert unit.is_there
    assert stream.call_count == ask.call_count == 0


def test_a_call_that_works_on_no_unit_records_nothing() -> None:
    def only_a(call: Call) -> Unit | None:
        unit: Unit = call.subject
        return unit if unit.name == "a" else None

    with watched([unshard_point(Unit, "gather", VIEW, unit_of=only_a)]):
        records = _records(Unit("a").gather, Unit("b").gather)
    assert [r["unit"] for r in records] == ["a", "a", "a", None]


def test_the_optimizer_and_readers_of_gradients_are_told_before_they_run() -> None:
    with watched([optimizer_point(Unit, "wait"), gradient_read_point(Unit, "scatter", by="norm")]):
        records = _records(Unit("a").scatter, Unit("a").wait)
    assert [r["op"] for r in records] == [
        "grad_read",
        "collective",
        "optimizer_step",
        "collective_wait",
    ]
    assert records[0] == {"op": "grad_read", "stream": 3, "by": "norm"}
