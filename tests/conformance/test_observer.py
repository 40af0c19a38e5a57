"""The recorder for GPUs, held against the fake runtime that it stands beside.

Over fake CUDA both can write the same run: the fake runtime by itself, and the wrappers by what the
code under test calls. Their records must be the same, so what the wrappers write on a GPU means
what a simulated trace means.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import handle_torch_function, has_torch_function

from real.config import Scenario, load_scenario
from real.gpu.durations import DeviceTimes, HoldingSink
from real.gpu.loopback import Seat, padded_with_zeros
from real.gpu.observe import observed, swap_table, wrapped
from real.gpu.recorder import GpuRecorder
from real.trace import MemorySink, OpKind, Recorder, Trace, recording, validate_record
from real.trace.recorder import Record
from sim.checks import check_traces
from sim.cuda import Event, FakeDevice, Stream, fake_cuda, use_device
from sim.diff import compare
from tests.conformance.conftest import CONFIGS, to_traces

if TYPE_CHECKING:
    from tests.conformance.conftest import Backends


def no_priority(_: int) -> int:
    return 0


@pytest.fixture
def recorder() -> Iterator[tuple[GpuRecorder, MemorySink]]:
    """A recorder that is at work on a fake device, which itself records nothing."""
    sink = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        with observed(GpuRecorder(sink, priority=no_priority)) as active:
            yield active, sink


def validated(record: Record) -> Record:
    validate_record(record)
    return record


def written(sink: MemorySink, *fields: str) -> list[tuple[Any, ...]]:
    """Returns some fields of what was written, numbers of streams and groups left out."""
    for record in sink.records:
        validate_record(record)
    return [
        (record["op"], *(record.get(field) for field in fields))
        for record in sink.records
        if record["op"] not in ("stream", "group")
    ]


# -- a whole run -----------------------------------------------------------------------------


def record_by_wrappers(scenario: Scenario) -> list[Trace]:
    """Trains a scenario on fake ranks whose devices record nothing; the wrappers do."""
    from sim.quiet import quiet
    from sim.session.megatron import megatron_on_fake_cuda, rank_state

    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        quiet()
        stack.enter_context(megatron_on_fake_cuda())
        from real.mcore import watch_table
        from real.mcore.jobs import FsdpJob, run_job
        from real.mcore.model import initialize_parallel
        from real.mcore.observe import recorded_nodes
        from sim.world import World, init_process_group
        from sim.world.process_group import FakeProcessGroup

        def body(rank: int) -> None:
            recorder = GpuRecorder(sinks[rank], priority=no_priority)
            recorder.header(rank=rank, world_size=scenario.world_size, scenario=scenario.as_dict())
            with use_device(FakeDevice(rank, Recorder())), recording(recorder):
                init_process_group(rank, scenario.world_size)
                initialize_parallel(scenario)
                job = FsdpJob(scenario)
                watch_table.describe(job.model, recorder.storage_number)
                run_job(job, scenario)
                recorder.close()

        with recorded_nodes(), wrapped(FakeProcessGroup):
            World(scenario.world_size, state=rank_state()).run(body)
    return to_traces(sinks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["combined-2-delayed", "plain-2"])
def test_wrappers_write_what_the_fake_runtime_writes(name: str, backends: Backends) -> None:
    """Every record and its order, in a run of both steps, hooks and schedules."""
    observed_traces = record_by_wrappers(load_scenario(CONFIGS / f"{name}.toml"))
    simulated = backends.simulated(name)
    result = compare(simulated, observed_traces, is_canonical=True)
    assert result.differences == ()
    assert result.num_lines > 400
    assert {a.name: count for a, count in result.allowed.items() if "differ" in count} == {}
    named = [
        [r for r in traces[0].records if r["op"] == "name"]
        for traces in (simulated, observed_traces)
    ]
    assert [(r["unit"], r["kind"]) for r in named[0]] == [(r["unit"], r["kind"]) for r in named[1]]
    assert len(named[0]) >= 5
    assert check_traces(observed_traces) == []


# -- streams and events ----------------------------------------------------------------------


def test_a_wait_for_a_stream_is_one_record(recorder: tuple[GpuRecorder, MemorySink]) -> None:
    """Torch makes an event of it, which nobody asked for."""
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    one.wait_stream(other)
    assert written(recorder[1], "stream", "on") == [("stream_wait", 1, 0)]


def test_a_wait_names_the_newest_record_of_its_event(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """An event that is recorded again means the later record; one never recorded means none."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_event(event)
    event.record(stream)
    event.record(stream)
    event.wait(stream)
    stream.record_event().synchronize()
    records = [r for r in recorder[1].records if r["op"] != "stream"]
    assert [r["op"] for r in records] == [
        "event_wait",
        "event_record",
        "event_record",
        "event_wait",
        "event_record",
        "host_sync",
    ]
    assert records[0]["record"] is None
    assert records[3]["record"] == records[2]["seq"]
    assert records[5]["on"] == records[4]["seq"]
    assert [r.get("event") for r in records] == [0, 0, 0, 0, 1, None]


def test_storages_keep_their_number_and_give_it_to_nobody_else(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """The address of a storage that is gone may be used again at once."""
    stream = torch.cuda.Stream()
    for _ in range(3):
        tensor = torch.empty(16)
        tensor.record_stream(stream)
        tensor.untyped_storage().resize_(0)
        del tensor
    storages = [r["storage"] for r in recorder[1].records if "storage" in r]
    assert storages == [0, 0, 1, 1, 2, 2]


def test_a_note_to_the_allocator_is_one_record_under_a_function_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch hands the mode whatever stands under the method's name, so the wrapper runs again."""
    noted: list[torch.Tensor] = []

    def record_stream(self: torch.Tensor, s: Stream) -> None:
        if has_torch_function((self,)):  # as every method of C++ begins
            handle_torch_function(torch.Tensor.record_stream, (self,), self, s)
        else:
            noted.append(self)

    sink = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        with observed(GpuRecorder(sink, priority=no_priority)), padded_with_zeros(Seat(0, 2)):
            torch.empty(16).record_stream(torch.cuda.Stream())
        monkeypatch.undo()
    assert len(noted) == 1
    assert written(sink, "storage") == [("record_stream", 0)]


def test_host_waits_and_profiler_ranges_are_written(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """The rest of the table."""
    torch.cuda.synchronize()
    torch.cuda.Stream().synchronize()
    torch.cuda.nvtx.range_push("text")
    torch.cuda.nvtx.range_pop()
    assert written(recorder[1], "what", "text") == [
        ("host_sync", "device", None),
        ("host_sync", "stream", None),
        ("nvtx_push", None, "text"),
        ("nvtx_pop", None, None),
    ]


def test_every_name_is_restored_after_an_error() -> None:
    """Whoever trains on afterwards trains on torch itself."""
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        before = [vars(swap.owner).get(swap.name) for swap in swap_table()]
        seen = None
        try:
            with observed(GpuRecorder(priority=no_priority)):
                seen = [vars(swap.owner).get(swap.name) for swap in swap_table()]
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert seen is not None
        assert all(now is not then for now, then in zip(seen, before, strict=True))
        assert [vars(swap.owner).get(swap.name) for swap in swap_table()] == before


def test_wrappers_are_silent_for_a_recorder_of_another_kind() -> None:
    """The fake runtime writes its own records; twice would be wrong."""
    sink = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder())), wrapped(), recording(Recorder(sink)):
        torch.cuda.Stream().wait_stream(torch.cuda.Stream())
        torch.cuda.Event().record()
    assert sink.records == []


# -- communication ---------------------------------------------------------------------------


@pytest.fixture
def gloo() -> Iterator[None]:
    """A world of one real process group, whose class is the one that NCCL's groups have."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def _joined(*, is_async: bool) -> Iterator[None]:
    with dist._coalescing_manager(async_ops=is_async) as manager:
        yield
    if is_async:
        manager.wait()


def _calls(one: torch.Tensor, other: torch.Tensor) -> dict[str, Callable[[], object]]:
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(other, one),
        "all_gather ": lambda: dist.all_gather([other], one),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(other, one),
        "reduce_scatter ": lambda: dist.reduce_scatter(other, [one]),
        "all_to_all_single": lambda: dist.all_to_all_single(other, one),
        "gather": lambda: dist.gather(one, [other], 0),
        "scatter": lambda: dist.scatter(other, [one], 0),
    }


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # by torch 2.14
def test_each_function_of_torch_distributed_is_one_record(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """They call one another's methods; what they read and write is the caller's."""
    one, other = torch.ones(4), torch.zeros(4)
    calls = _calls(one, other)
    for call in calls.values():
        call()
    fields = ("kind", "n", "async", "bytes", "dtype", "reads", "writes")
    assert written(recorder[1], *fields) == [
        ("collective", name.strip(), n, False, 16, "float32", [0], [1])
        for n, name in enumerate(calls)
    ]


@pytest.mark.usefixtures("gloo")
def test_calls_in_place_read_and_write_the_same(recorder: tuple[GpuRecorder, MemorySink]) -> None:
    """And a barrier nothing."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    dist.barrier()
    assert written(recorder[1], "kind", "reads", "writes") == [
        ("collective", "all_reduce", [0], [0]),
        ("collective", "broadcast", [0], [0]),
        ("collective", "reduce", [0], [0]),
        ("collective", "barrier", [], []),
    ]


@pytest.mark.usefixtures("gloo")
def test_the_wait_for_an_asynchronous_call_names_the_call(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """A handle that is dropped, and one that is waited for again, are written no more."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor, async_op=True)
    work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)
    assert work is not None
    work.wait()
    work.wait()
    assert written(recorder[1], "n", "async") == [
        ("collective", 0, True),
        ("collective", 1, True),
        ("collective", 2, False),
        ("collective_wait", 1, None),
    ]


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("is_async", [False, True])
def test_joined_calls_are_one(is_async: bool, recorder: tuple[GpuRecorder, MemorySink]) -> None:
    """Torch hands the process group all tensors at once."""
    with _joined(is_async=is_async):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    expected: list[tuple[object, ...]] = [("collective", 32, is_async)]
    if is_async:
        expected.append(("collective_wait", None, None))
    assert written(recorder[1], "bytes", "async") == expected


@pytest.mark.usefixtures("gloo")
def test_a_group_is_written_with_its_ranks_before_its_first_call(
    recorder: tuple[GpuRecorder, MemorySink],
) -> None:
    """Checks compare the ranks of a group call by call."""
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    groups = [(r["group"], r["ranks"]) for r in recorder[1].records if r["op"] == "group"]
    assert groups == [("0", [0])]


# -- times -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("gloo")
def test_device_times_are_those_of_the_work_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node starts behind its wait; each recorded event stands for a millisecond here."""
    clock = [0]
    times: dict[int, int] = {}
    record = Event.record

    def tick(self: Event, stream: Stream | None = None) -> None:
        clock[0] += 1
        times[id(self)] = clock[0]
        record(self, stream)

    monkeypatch.setattr(Event, "record", tick)
    monkeypatch.setattr(
        Event, "elapsed_time", lambda self, end: float(times[id(end)] - times[id(self)])
    )
    memory = MemorySink()
    with fake_cuda(), use_device(FakeDevice(0, Recorder())):
        sink = HoldingSink(memory)
        recorder = GpuRecorder(sink, priority=no_priority, times=DeviceTimes(sink))
        with observed(recorder):
            stream, done = torch.cuda.current_stream(), torch.cuda.Event()
            recorder.begin_step(0)
            done.record(stream)
            node = {"name": "mlp", "direction": "forward", "layer": None, "microbatch": 0}
            recorder.record(OpKind.NODE, **node, chunk=0, phase=None, stream=stream.stream_id)
            done.record(stream)  # work before the node's own wait is not the node's
            done.wait(stream)
            dist.all_reduce(torch.ones(4))
            recorder.record(OpKind.NODE_END, name="mlp", direction="forward")
            assert [r["op"] for r in memory.records] == ["step"]
            recorder.close()
    by_op = {record["op"]: validated(record) for record in memory.records}
    call, node = by_op["collective"], by_op["node"]
    assert call["end_ns"] - call["start_ns"] == 1_000_000
    assert node["start_ns"] == call["start_ns"] - 1_000_000
    assert node["end_ns"] == call["end_ns"] + 1_000_000
    assert all("host_ns" in record for record in memory.records)


def test_records_are_held_back_until_their_times_are_known() -> None:
    """And handed on in order."""
    memory = MemorySink()
    sink = HoldingSink(memory)
    sink.write({"seq": 0})
    sink.write({"seq": 1})
    assert memory.records == []
    sink.close()
    assert [r["seq"] for r in memory.records] == [0, 1]
