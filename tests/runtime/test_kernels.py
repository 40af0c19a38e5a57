"""Every kernel is seen with what it reads and writes, on the stream that a GPU would run it on."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from real.trace import MemorySink, Recorder
from real.trace.record import validate_record
from sim.cuda import FakeDevice, fake_cuda, use_device
from sim.cuda.device import active_device
from sim.cuda.kernels import KernelRecorder

Records = list[dict[str, Any]]
Show = Callable[[], list[str]]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A fake device in use whose kernels are recorded."""
    device = FakeDevice(0, Recorder(MemorySink()))
    with fake_cuda(), use_device(device):
        yield device


@pytest.fixture
def show(device: FakeDevice) -> Iterator[Show]:
    """Records kernels; returns the records since the last call, as short texts."""
    sink: Any = device.recorder._sink
    sink.records.clear()

    def take() -> list[str]:
        lines = [_line(record) for record in sink.records]
        sink.records.clear()
        return lines

    with KernelRecorder(device):
        yield take


def _line(record: dict[str, Any]) -> str:
    validate_record(record)
    match record["op"]:
        case "kernel":
            reads, writes = (" ".join(map(str, record[key])) for key in ("reads", "writes"))
            return " ".join(f"{record['stream']}: {record['name']} {reads} -> {writes}".split())
        case "allocate":
            return f"{record['stream']}: allocate {record['storage']} {record['bytes']}"
        case "free":
            return f"free {record['storage']}"
        case op:
            return str(op)


# -- reads and writes ------------------------------------------------------------------------


def test_an_operation_reads_its_arguments_and_writes_a_new_storage(show: Show) -> None:
    """The storage is allocated where it is first an output."""
    a, b = torch.zeros(4), torch.zeros(4)
    show()
    total = a + b
    assert show() == ["0: allocate 2 16", "0: add 0 1 -> 2"]
    del total


def test_an_argument_given_twice_is_read_once(show: Show) -> None:
    """A list of storages, not of arguments."""
    a = torch.zeros(4)
    show()
    square = a * a
    assert show() == ["0: allocate 1 16", "0: mul 0 -> 1"]
    del square


def test_an_operation_in_place_writes_its_argument(show: Show) -> None:
    """Nothing is allocated."""
    a, b = torch.zeros(4), torch.zeros(4)
    show()
    a.add_(b)
    assert show() == ["0: add_ 1 -> 0"]


def test_a_list_operation_in_place_writes_its_first_list(show: Show) -> None:
    """Optimizers step so."""
    a, b, c, d = (torch.zeros(4) for _ in range(4))
    show()
    torch._foreach_add_([a, b], [c, d])
    assert show() == ["0: _foreach_add_ 2 3 -> 0 1"]


def test_out_is_written(show: Show) -> None:
    """It is given by name."""
    a, b, out = torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    show()
    torch.mm(a, b, out=out)
    assert show() == ["0: mm 0 1 -> 2"]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:],
        lambda t: t.view(2, 2),
        lambda t: t.detach(),
        lambda t: t.unsqueeze(0).expand(3, 4),
        lambda t: t.split(2),
        lambda t: t.t(),
    ],
    ids=["slice", "view", "detach", "expand", "split", "transpose"],
)
def test_a_view_launches_nothing(show: Show, view: Any) -> None:
    """It is another look at the same memory."""
    a = torch.zeros(4)
    show()
    view(a)
    assert show() == []


def test_a_view_is_used_as_the_storage_behind_it(show: Show) -> None:
    """Reads and writes through views are of the whole storage."""
    a, b = torch.zeros(4), torch.zeros(2)
    show()
    a[2:].copy_(b)
    b.add_(a[:2])
    assert show() == ["0: copy_ 1 -> 0", "0: add_ 0 -> 1"]


def test_an_empty_tensor_is_allocated_and_not_written(show: Show) -> None:
    """No kernel runs: a read of it later is a read of nothing."""
    a = torch.empty(4)
    assert show() == ["0: allocate 0 16"]
    a.zero_()
    assert show() == ["0: zero_ -> 0"]


# -- allocation and free ---------------------------------------------------------------------


def test_a_storage_is_allocated_on_the_current_stream(show: Show) -> None:
    """Its block goes back to the pool of that stream, whoever uses it later."""
    side = torch.cuda.Stream()
    show()
    with torch.cuda.stream(side):
        a = torch.zeros(4)
    a.add_(1)
    assert show() == ["1: allocate 0 16", "1: zeros -> 0", "0: add_ -> 0"]


def test_a_storage_is_allocated_once(show: Show) -> None:
    """At its first output only."""
    a = torch.zeros(4)
    show()
    a.add_(1)
    torch.add(a, 1, out=a)
    assert [line for line in show() if "allocate" in line] == []


def test_a_storage_is_freed_with_its_last_tensor(show: Show) -> None:
    """As a reference count does it, in host order; the garbage collector has no part in it."""
    gc.disable()
    try:
        a = torch.zeros(4)
        view = a[1:]
        show()
        del a
        assert show() == []
        view.add_(1)
        del view
        assert show() == ["0: add_ -> 0", "free 0"]
    finally:
        gc.enable()


def test_a_temporary_is_freed_when_the_next_one_is_made(show: Show) -> None:
    """Between two kernels of one expression."""
    a = torch.zeros(4)
    show()
    b = a + 1 + 2
    assert show() == [
        "0: allocate 1 16",
        "0: add 0 -> 1",
        "0: allocate 2 16",
        "0: add 1 -> 2",
        "free 1",
    ]
    del b


def test_what_autograd_saved_is_freed_by_backward(show: Show) -> None:
    """Activations live as long as their graph."""
    a = torch.ones(4, requires_grad=True)
    show()
    loss = (a * 2).exp().sum()
    before = show()
    assert [line for line in before if line.startswith("free")] == ["free 1"]
    loss.backward()
    assert "free 2" in show()


@pytest.mark.parametrize("use", [lambda t: t.add_(1), lambda t: t + 1, lambda t: t.view(2, 2)])
def test_a_storage_from_before_has_neither_allocation_nor_free(
    device: FakeDevice, use: Any
) -> None:
    """Nobody saw where it came from; the checks take its stream as unknown."""
    sink: Any = device.recorder._sink
    a = torch.zeros(4)
    number = device.storage_id(a.untyped_storage())
    with KernelRecorder(device):
        use(a)
        del a
    touched = [r for r in sink.records if r["op"] in ("allocate", "free")]
    assert number not in [record["storage"] for record in touched]


# -- autograd --------------------------------------------------------------------------------


def test_backward_kernels_are_on_the_stream_of_their_forward(show: Show) -> None:
    """Wherever backward is called."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.ones(4, requires_grad=True)
    with torch.cuda.stream(first):
        b = a.exp()
    with torch.cuda.stream(second):
        c = b.sin()
    gradient = torch.ones(4)
    show()
    c.backward(gradient)
    kernels = [line.split()[:2] for line in show() if "->" in line]
    assert kernels == [["2:", "cos"], ["2:", "mul"], ["1:", "mul"]]


# -- DTensor ---------------------------------------------------------------------------------


def test_a_dtensor_counts_as_its_local_tensor(run_ranks: Any) -> None:
    """The kernel runs on the local shard, and once."""

    def body(rank: int) -> tuple[list[int], Records]:
        device = active_device()
        mesh = init_device_mesh("cuda", (1,))
        local = torch.zeros(4)
        a = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        number = device.storage_id(local.untyped_storage())
        start = len(sink.records)
        with KernelRecorder(device):
            b = a + 1
            a.add_(1)
            result = device.storage_id(b.to_local().untyped_storage())
        return [number, result], sink.records[start:]

    sink = MemorySink()
    [((number, result), records)] = run_ranks(1, body, sinks=[sink])
    kernels = [(r["name"], r["reads"], r["writes"]) for r in records if r["op"] == "kernel"]
    assert kernels == [("add", [number], [result]), ("add_", [], [number])]


# -- determinism -----------------------------------------------------------------------------


def test_the_same_program_gives_the_same_records() -> None:
    """Traces are compared byte by byte."""

    def run() -> Records:
        sink = MemorySink()
        device = FakeDevice(0, Recorder(sink))
        with fake_cuda(), use_device(device), KernelRecorder(device):
            side = torch.cuda.Stream()
            weight = torch.ones(4, 4, requires_grad=True)
            for _ in range(3):
                hidden = torch.ones(2, 4) @ weight
                with torch.cuda.stream(side):
                    loss = torch.nn.functional.gelu(hidden).sum()
                loss.backward()
            del hidden, loss, weight
        return sink.records

    first, second = run(), run()
    assert len(first) > 30
    assert first == second


def test_shapes_are_recorded_on_request(device: FakeDevice) -> None:
    """Of what is read, then of what is written, each with its element type."""
    sink: Any = device.recorder._sink
    left, right = torch.zeros(2, 3), torch.zeros(3, 4)
    with KernelRecorder(device, records_shapes=True):
        product = left @ right
        product.add_(1)
    shapes = [record["shapes"] for record in sink.records if record["op"] == "kernel"]
    assert shapes == [
        [["f32", 2, 3], ["f32", 3, 4], ["f32", 2, 4]],
        [["f32", 2, 4]],
    ]
