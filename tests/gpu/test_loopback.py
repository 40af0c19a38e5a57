"""One rank of eight whose peers are not there: what each call gives it, and on which stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from real.gpu.fill import fill, repeat, scale_of
from real.gpu.loopback import Seat, init_loopback, padded_with_zeros
from real.gpu.observe import observed
from real.gpu.recorder import GpuRecorder
from real.trace import MemorySink, Recorder
from sim.cuda import FakeDevice, fake_cuda, use_device

pytestmark = pytest.mark.filterwarnings(  # by torch 2.14
    "ignore:.*is deprecated. Please use:FutureWarning"
)

SIZE, RANK = 8, 3
OWN = torch.tensor([1.0, 2.0])


@pytest.fixture
def seat() -> Iterator[Seat]:
    """Rank 3 of 8, on a CPU."""
    taken = Seat(RANK, SIZE)
    init_loopback(taken)
    yield taken
    dist.destroy_process_group()


def in_list(output: torch.Tensor, own: torch.Tensor) -> None:
    dist.all_gather([*output.chunk(SIZE)], own)


def all_gathered(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    output = torch.full((2 * SIZE,), float("nan"))
    call(output, OWN.clone())
    return output


# -- values ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("seat")
def test_a_gather_repeats_what_this_rank_gives() -> None:
    """Into one tensor, into a list, and objects."""
    expected = OWN.repeat(SIZE)
    assert torch.equal(all_gathered(dist.all_gather_into_tensor), expected)
    assert torch.equal(all_gathered(in_list), expected)
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": RANK}] * SIZE


@pytest.mark.usefixtures("seat")
def test_a_gather_in_place_leaves_the_own_part() -> None:
    """MFSDP gathers into the buffer that holds its shard."""
    whole = torch.full((2 * SIZE,), float("nan"))
    whole[2 * RANK : 2 * RANK + 2] = OWN
    dist.all_gather_into_tensor(whole, whole[2 * RANK : 2 * RANK + 2])
    assert torch.equal(whole, OWN.repeat(SIZE))


@pytest.mark.usefixtures("seat")
@pytest.mark.parametrize(("op", "scale"), [(dist.ReduceOp.SUM, 8), (dist.ReduceOp.AVG, 1)])
def test_a_reduction_scales_the_own_part(op: dist.ReduceOp, scale: int) -> None:
    """As if all eight had given the same."""
    whole = torch.arange(2.0 * SIZE)
    own = whole[2 * RANK : 2 * RANK + 2] * scale
    output = torch.full((2,), float("nan"))
    dist.reduce_scatter_tensor(output, whole.clone(), op=op)
    assert torch.equal(output, own)
    listed = torch.full((2,), float("nan"))
    dist.reduce_scatter(listed, [*whole.clone().chunk(SIZE)], op=op)
    assert torch.equal(listed, own)
    in_place = whole.clone()
    dist.reduce_scatter_tensor(in_place[2 * RANK : 2 * RANK + 2], in_place, op=op)
    assert torch.equal(in_place[2 * RANK : 2 * RANK + 2], own)
    everywhere = whole.clone()
    dist.all_reduce(everywhere, op=op)
    assert torch.equal(everywhere, whole * scale)


@pytest.mark.usefixtures("seat")
def test_a_maximum_of_equal_values_is_the_value() -> None:
    """And flags that are summed stay flags."""
    tensor = OWN.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    assert torch.equal(tensor, OWN)
    flags = torch.tensor([True, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False]


def test_a_scaled_sum_multiplies_by_its_factor() -> None:
    """MFSDP v1 divides gradients so."""
    make: Any = dist._make_nccl_premul_sum
    assert scale_of(make(0.25), SIZE) == 2.0


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        (3, 3, [0, 1, 2]),
        (3, 2, [0, 1]),
        (2, 5, [0, 1, 0, 1, 0]),
        (0, 2, [0, 0]),
        (2, 0, []),
    ],
)
@pytest.mark.usefixtures("seat")
def test_an_exchange_returns_the_input_at_the_size_asked_for(
    given: int, wanted: int, expected: list[int]
) -> None:
    """More tokens than were sent are the same tokens again; rows stay whole."""
    rows = torch.arange(float(given)).unsqueeze(1).repeat(1, 4)
    output = torch.full((wanted, 4), float("nan"))
    dist.all_to_all_single(output, rows, [wanted, *[0] * (SIZE - 1)], [given, *[0] * (SIZE - 1)])
    assert output.tolist() == [[float(value)] * 4 for value in expected]


@pytest.mark.usefixtures("seat")
def test_an_exchange_of_lists_returns_each_entry() -> None:
    inputs = [torch.full((2,), float(n)) for n in range(SIZE)]
    outputs = [torch.zeros(3) for _ in range(SIZE)]
    dist.all_to_all(outputs, inputs)
    assert [output.tolist() for output in outputs] == [[float(n)] * 3 for n in range(SIZE)]


@pytest.mark.usefixtures("seat")
def test_a_broadcast_leaves_what_is_there() -> None:
    """And a reduction to another rank too; one to this rank is the sum."""
    tensor = OWN.clone()
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    dist.barrier()
    assert torch.equal(tensor, OWN)
    dist.reduce(tensor, RANK)
    assert torch.equal(tensor, OWN * SIZE)


@pytest.mark.usefixtures("seat")
def test_this_rank_scatters_its_own_part_and_gathers_its_own() -> None:
    output = torch.zeros(1)
    dist.scatter(output, [torch.tensor([float(n)]) for n in range(SIZE)], RANK)
    assert output.item() == RANK
    parts = [torch.zeros(2) for _ in range(SIZE)]
    dist.gather(OWN, parts, RANK)
    assert all(torch.equal(part, OWN) for part in parts)
    objects: list[Any] = [None] * SIZE
    dist.gather_object("mine", objects, RANK)
    assert objects == ["mine"] * SIZE


@pytest.mark.usefixtures("seat")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dist.send(torch.zeros(1), 0), "got send to 0"),
        (lambda: dist.recv(torch.zeros(1), 0), "got recv of 0"),
        (lambda: dist.scatter(torch.zeros(1), None, 0), "got one from a peer"),
        (lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT), "Expected a sum"),
    ],
)
def test_what_has_no_stand_in_is_refused_by_name(call: Callable[[], object], said: str) -> None:
    """Memory that nobody wrote would be worse."""
    with pytest.raises(NotImplementedError, match=said):
        call()


def test_tensors_that_do_not_fit_are_refused() -> None:
    """As a library of communication refuses them."""
    call = {"group_size": SIZE, "rank": RANK}
    with pytest.raises(ValueError, match="Expected room for 8 times 2 elements, got 15"):
        fill("all_gather", [OWN], [torch.zeros(15)], **call)
    with pytest.raises(ValueError, match="Expected an output of 2 elements, got 3"):
        fill("reduce_scatter", [torch.zeros(16)], [torch.zeros(3)], **call)
    with pytest.raises(ValueError, match="Expected 8 equal parts of 15 elements"):
        fill("reduce_scatter", [torch.zeros(15)], [torch.zeros(2)], **call)
    with pytest.raises(ValueError, match=r"Expected torch.float32 in an output, got torch.int64"):
        repeat(OWN, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="got teleport"):
        fill("teleport", [], [], **call)


def test_no_version_counter_moves() -> None:
    """Autograd must not see a write that it does not see on NCCL."""
    tensor, gathered = OWN.clone(), torch.zeros(2 * SIZE)
    fill("all_reduce", [tensor], [tensor], group_size=SIZE, rank=RANK, scale=SIZE)
    fill("all_gather", [tensor], [gathered], group_size=SIZE, rank=RANK)
    assert (tensor._version, gathered._version) == (0, 0)
    assert gathered[-1].item() == 16.0


def test_padding_begins_with_zeros_for_a_rank_alone() -> None:
    """Its shard comes again and again; among peers its padding stays at the end."""
    with padded_with_zeros(Seat(RANK, SIZE)):
        assert torch.equal(torch.empty(1000), torch.zeros(1000))
        assert torch.ones(2).tolist() == [1.0, 1.0]
    with padded_with_zeros(None):
        assert not torch.overrides._get_current_function_mode_stack()


# -- groups ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("seat")
def test_a_smaller_group_has_its_own_size_and_number() -> None:
    """Those that this rank is not in are told so."""
    mine, _ = dist.new_group([1, 3]), dist.new_group([0, 2])
    assert (dist.get_world_size(mine), dist.get_rank(mine)) == (2, 1)
    assert dist.get_rank() == RANK
    tensor = OWN.clone()
    dist.all_reduce(tensor, group=mine)
    assert torch.equal(tensor, OWN * 2)
    assert "rank 1 of 2" in repr(mine)


@pytest.mark.usefixtures("seat")
def test_a_device_mesh_and_its_tensors_work() -> None:
    """MFSDP shards over a mesh of two axes; functional collectives come from C++."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    assert list(mesh.get_coordinate() or []) == [0, 3]
    shard = DTensor.from_local(OWN.clone(), mesh["inner"], [Shard(0)])
    assert torch.equal(shard.redistribute(placements=[Replicate()]).to_local(), OWN.repeat(4))


# -- streams ---------------------------------------------------------------------------------


@contextmanager
def on_fake_device() -> Iterator[MemorySink]:
    """Rank 3 of 8 on a fake device that records what its streams do."""
    sink = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder(sink))):
        init_loopback(Seat(RANK, SIZE))
        try:
            yield sink
        finally:
            dist.destroy_process_group()


def streams(sink: MemorySink) -> list[tuple[Any, ...]]:
    """Returns what was done with streams: the compute stream is 0."""
    fields = {
        "stream_wait": ("stream", "on"),
        "event_record": ("stream",),
        "event_wait": ("stream",),
        "host_sync": ("what",),
    }
    return [
        (record["op"].value, *(record[field] for field in fields[record["op"]]))
        for record in sink.records
        if record["op"] in fields
    ]


def test_a_synchronous_call_stays_on_the_current_stream() -> None:
    """As NCCL's since torch 2.8."""
    with on_fake_device() as sink:
        dist.all_reduce(torch.ones(2))
        assert streams(sink) == []


def test_an_asynchronous_call_has_a_stream_of_its_own() -> None:
    """It waits for the caller's at its issue; whoever waits for the handle waits for it."""
    with on_fake_device() as sink:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        issued = [("stream_wait", 1, 0), ("event_record", 1)]
        assert streams(sink) == issued
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
        assert streams(sink) == [*issued, ("event_wait", 2)]


def test_each_group_has_one_stream() -> None:
    """Two calls of one group run in order, those of two groups side by side."""
    with on_fake_device() as sink:
        other = dist.new_group([1, 3])
        for group in (None, None, other):
            dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert [entry[1] for entry in streams(sink) if entry[0] == "event_record"] == [1, 1, 2]


def test_tensors_live_until_the_wait() -> None:
    """The caller may drop them at once, while the other stream still reads them."""
    from weakref import ref

    with on_fake_device():
        tensor = torch.ones(2)
        alive = ref(tensor)
        work = dist.all_gather_into_tensor(torch.zeros(2 * SIZE), tensor, async_op=True)
        del tensor
        assert alive() is not None
        assert work is not None
        work.wait()
        assert alive() is None


def test_a_barrier_stops_the_host() -> None:
    with on_fake_device() as sink:
        dist.barrier()
        assert streams(sink) == [("host_sync", "stream")]


def test_joined_calls_have_one_handle() -> None:
    """Torch hands over all tensors at once."""
    with on_fake_device():
        tensors = [torch.ones(2), torch.ones(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert [tensor[0].item() for tensor in tensors] == [8.0, 8.0]


def test_joined_calls_of_the_old_style_have_one_handle() -> None:
    """Each is issued by itself, and the last handle stands for all."""
    with on_fake_device() as sink:
        tensor = torch.ones(2)
        with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
            dist.broadcast(tensor, 0, async_op=True)
            dist.broadcast(tensor, 0, async_op=True)
        manager.wait()
        assert [entry[0] for entry in streams(sink)].count("event_wait") == 2


# -- records ---------------------------------------------------------------------------------


def test_the_observer_sees_calls_and_waits_but_no_stream_of_the_group() -> None:
    """What NCCL does inside is no record either."""
    sink = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        init_loopback(Seat(RANK, SIZE))
        with observed(GpuRecorder(sink, priority=lambda _: 0)):
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            work = dist.all_gather_into_tensor(torch.zeros(16), tensor, async_op=True)
            assert work is not None
            work.wait()
            dist.barrier()
        dist.destroy_process_group()
    told = [
        (r["op"].value, r.get("kind"), r.get("n"), r.get("async"), r.get("bytes"))
        for r in sink.records
    ]
    assert told == [
        ("group", None, None, None, None),
        ("stream", None, None, None, None),
        ("collective", "all_reduce", 0, False, 8),
        ("collective", "all_gather", 1, True, 8),
        ("collective_wait", None, 1, None, None),
        ("collective", "barrier", 2, False, 0),
    ]
    assert sink.records[0]["ranks"] == list(range(SIZE))
