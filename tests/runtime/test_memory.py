"""Storage changes are seen, and a storage's number is never used again."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from sim.cuda import FakeDevice

Records = list[dict[str, Any]]


def test_record_stream_names_storage_and_stream(records: Records) -> None:
    tensor, side = torch.zeros(4), torch.cuda.Stream()
    records.clear()
    tensor.record_stream(side)
    tensor[1:].record_stream(torch.cuda.current_stream())
    assert [(r["op"], r["stream"], r["storage"]) for r in records] == [
        ("record_stream", 1, 0),
        ("record_stream", 0, 0),
    ]


def test_release_and_reallocation_are_records_of_one_storage(records: Records) -> None:
    """`resize_(0)` gives memory back and keeps the storage; a later resize takes memory again."""
    storage = torch.zeros(4).untyped_storage()
    storage.resize_(0)
    storage.resize_(16)
    assert storage.nbytes() == 16
    assert [(r["op"], r["storage"], r["was"], r["bytes"]) for r in records] == [
        ("resize", 0, 16, 0),
        ("resize", 0, 0, 16),
    ]


def test_resize_happens_on_the_current_stream(records: Records) -> None:
    storage, side = torch.zeros(4).untyped_storage(), torch.cuda.Stream()
    records.clear()
    with torch.cuda.stream(side):
        storage.resize_(0)
    assert [record["stream"] for record in records] == [1]


def test_number_of_a_storage_is_not_used_again(device: FakeDevice) -> None:
    """Even when the next storage gets the address of one that is gone."""
    numbers = []
    for _ in range(10):
        tensor = torch.zeros(1000)
        numbers.append(device.storage_id(tensor.untyped_storage()))
        del tensor
        gc.collect(0)
    assert numbers == list(range(10))


def test_a_storage_keeps_its_number_through_views(device: FakeDevice) -> None:
    """The number rides on the storage, so nothing piles up for those that are gone."""
    tensor = torch.zeros(4)
    number = device.storage_id(tensor.untyped_storage())
    view = tensor.view(2, 2)
    del tensor
    gc.collect(0)
    assert device.storage_id(view.untyped_storage()) == number


def test_each_device_numbers_a_storage_for_itself(device: FakeDevice, records: Records) -> None:
    """A tensor that outlives a run starts anew in the next one."""
    storage = torch.zeros(1).untyped_storage()
    device.storage_id(torch.zeros(1).untyped_storage())
    device.storage_id(storage)
    other = FakeDevice(1, device.recorder)
    assert (device.storage_id(storage), other.storage_id(storage)) == (1, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.empty(2, device=torch.device("cuda", 0)),
        lambda: torch.tensor([1.0], device=0),
        lambda: torch.ones(2).new_zeros(2, device="cuda:0"),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to(device="cuda", dtype=torch.float64),
        lambda: torch.ones(2).cuda(),
        lambda: torch.arange(3, device=torch.cuda.current_device()),
        lambda: torch.nn.Linear(2, 2).cuda().weight,
    ],
)
@pytest.mark.usefixtures("device")
def test_cuda_tensors_live_on_the_cpu_and_say_that_they_are_cuda(make: Any) -> None:
    tensor = make()
    assert tensor.device == torch.device("cpu")
    assert tensor.is_cuda


@pytest.mark.usefixtures("device")
def test_generator_of_a_cuda_device_draws() -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    again = torch.Generator(device="cuda").manual_seed(5)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=again))


@pytest.mark.usefixtures("device")
def test_device_and_host_random_states_are_apart() -> None:
    """Setting the host's state back does not rewind the device's."""
    host = torch.get_rng_state()
    torch.cuda.manual_seed(1)
    first = torch.rand(1)
    torch.set_rng_state(host)
    assert not torch.equal(torch.rand(1), first)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(1), first)


def test_an_emptied_storage_holds_no_values_and_can_be_read(records: Records) -> None:
    """A read of it is a fault for the checks to report, never the end of the interpreter."""
    tensor = torch.ones(1 << 16, dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == tensor.untyped_storage().size() == 0
    assert (tensor * 2).isnan().all()
    counts = torch.ones(8, dtype=torch.int64)
    counts.untyped_storage().resize_(0)
    assert counts.eq(-1).all()


def test_an_address_stays_over_a_release(records: Records) -> None:
    """As with the caching allocator, where nobody else has asked in between."""
    tensor = torch.ones(1 << 16)
    address = tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4 << 16)
    assert tensor.data_ptr() == address
    assert tensor.isnan().all()  # what was in it is gone
    assert [(r["was"], r["bytes"]) for r in records if r["op"] == "resize"] == [
        (4 << 16, 0),
        (0, 4 << 16),
    ]


def test_a_view_made_after_the_release_is_of_the_emptied_storage(records: Records) -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    assert tensor[2:4].untyped_storage().nbytes() == 0
