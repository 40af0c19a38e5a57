"""Calibration's parts run without a GPU, on small sizes and the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from real.config import load_scenario
from real.gpu import host, kernels, profiles
from real.gpu.host import Stopwatch, time_calls, time_collective_calls
from real.gpu.links import time_collectives, time_contention
from real.targets import RELEASED
from sim.commands.common import FIXTURES
from sim.hollow.mode import HollowMode
from sim.hollow.routing import Routing

CPU = torch.device("cpu")
CONFIG = FIXTURES / "configs" / "bench-b.toml"


@pytest.fixture
def stand_in() -> Iterator[None]:
    """Transformer Engine's stand-in under its own name."""
    from sim import te

    with te.installed():
        yield


@pytest.mark.usefixtures("stand_in")
def test_every_kernel_of_the_calibration_runs() -> None:
    """One wrong argument costs a measurement on a GPU that cannot be had again soon."""
    measured = list(kernels.time_kernels(CPU, kernels.TINY))
    assert [entry for entry in measured if "error" in entry] == []
    names = {entry["name"] for entry in measured}
    assert {"te:gemm_TN", "te:expert_gemm_NT", "bmm", "baddbmm", "sort", "mm"} <= names
    assert all(entry["us"] > 0 for entry in measured)


@pytest.mark.usefixtures("stand_in")
def test_shapes_of_expert_products_are_those_of_one_expert() -> None:
    """Four are timed at once, and a trace has them one by one."""
    sizes = kernels.Sizes(tokens=(8,), hidden=(16,), sequences=(), vocab=8, repeats=1)
    products = [e for e in kernels.time_kernels(CPU, sizes) if "expert" in e["name"]]
    assert products[0]["shapes"] == [["bf16", 32, 16], ["bf16", 8, 16], ["bf16", 8, 32]]
    assert products[2]["shapes"] == [["bf16", 8, 16], ["bf16", 8, 32], ["bf16", 32, 16]]


def test_host_calls_that_need_no_device_are_timed() -> None:
    """Every time is a positive number of microseconds."""
    times = time_calls(CPU, repeats=5)
    assert {"kernel_new", "autograd_node"} <= set(times)
    assert all(value > 0 for value in times.values())


def test_a_stopwatch_leaves_out_what_is_timed_inside() -> None:
    """A node's own cost is what its units do not explain."""
    watch = Stopwatch()
    watch.begin("node")
    watch.begin("unshard")
    watch.end()
    watch.end()
    times = watch.read()
    assert times["node"][0] == times["unshard"][0] == 1
    assert times["node"][2] == pytest.approx(times["node"][1] + times["unshard"][2])
    assert watch.read() == {}


def run_in_world(body: Callable[[], Any], num_ranks: int = 2) -> list[Any]:
    """Runs a function on fake ranks with Megatron's groups, and returns what each one returns."""
    from real.trace import Recorder, recording
    from sim.cuda import FakeDevice, use_device
    from sim.session.megatron import megatron_on_fake_cuda, rank_state

    with megatron_on_fake_cuda():
        from sim.world import World, init_process_group

        def run(rank: int) -> Any:  # noqa: ANN401
            from real.mcore.model import initialize_parallel

            recorder = Recorder()
            with use_device(FakeDevice(rank, recorder)), recording(recorder):
                init_process_group(rank, num_ranks)
                with HollowMode(Routing(), real_floats=0):  # nobody asks for values
                    initialize_parallel(scenario)
                    return body()

        scenario = load_scenario(CONFIG)
        return World(num_ranks, state=rank_state()).run(run)


class FirstRanksStopwatch(Stopwatch):
    """Hears the first rank alone: here all ranks share what is watched."""

    def begin(self, key: str) -> None:
        if current_rank() == 0:
            super().begin(key)

    def end(self) -> None:
        if current_rank() == 0:
            super().end()


def current_rank() -> int:
    return torch.distributed.get_rank()


@pytest.mark.slow
def test_nodes_of_all_variants_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a step are nodes, layers, backwards and units, each with its count."""
    watched = host._watched
    monkeypatch.setattr(host, "Stopwatch", FirstRanksStopwatch)
    monkeypatch.setattr(
        host, "_watched", lambda *given: nullcontext() if current_rank() else watched(*given)
    )
    changes: dict[str, Any] = {
        **host.SMALL, "num_layers": 2, "num_microbatches": 2, "hidden_size": 32, "seq_length": 32
    }  # fmt: skip
    scenario = load_scenario(CONFIG).changed(**changes)

    def body() -> Any:  # noqa: ANN401
        return host.time_nodes(
            {"small": scenario},
            ("mfsdp_plain", "mfsdp_combined_dw"),
            repeats=1,
            warmup=0,
            synchronize=lambda: None,
        )["small"]

    times = run_in_world(body)[0]
    plain, combined = times["mfsdp_plain"]["parts"], times["mfsdp_combined_dw"]["parts"]
    assert plain["layer forward"]["count"] == 4
    assert plain["model backward"]["count"] == 2
    assert combined["mlp forward"]["count"] == combined["mlp wgrad"]["count"] == 4
    assert combined["reduce"]["count"] + combined["reduce last"]["count"] > 4
    assert {"unshard gathered", "reshard"} <= set(combined)
    assert all(entry["step_us"] > 0 for entry in times.values())


@pytest.mark.slow
def test_collectives_are_timed_between_ranks() -> None:
    """The same collectives on all ranks, in the same order."""

    def body() -> Any:  # noqa: ANN401
        return (
            list(time_collectives(CPU, [1024])),
            time_collective_calls(CPU, repeats=2),
            time_contention(CPU, size=16, num_bytes=1024),
        )

    results = run_in_world(body)
    kinds = [entry["kind"] for entry in results[0][0]]
    assert kinds == ["all_gather", "reduce_scatter", "all_reduce", "all_to_all_single"]
    assert len(results[0][2]) == 6


def test_profiled_kernels_belong_to_the_innermost_node() -> None:
    """A kernel counts where the host launched it, whenever it ran."""
    events: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": "node:outer forward", "ts": 0, "dur": 100},
        {"cat": "user_annotation", "name": "node:inner forward", "ts": 10, "dur": 20},
        {"cat": "cuda_runtime", "name": "l", "ts": 15, "dur": 1, "args": {"correlation": 1}},
        {"cat": "cuda_runtime", "name": "l", "ts": 50, "dur": 1, "args": {"correlation": 2}},
        {"cat": "kernel", "name": "void gemm", "ts": 500, "dur": 7, "args": {"correlation": 1}},
        {"cat": "kernel", "name": "void add", "ts": 510, "dur": 3, "args": {"correlation": 2}},
    ]
    summary = profiles.summarise(events)
    assert summary["inner forward"] == {"runs": 1, "kernels": {"gemm": [1, 7.0]}}
    assert summary["outer forward"] == {"runs": 1, "kernels": {"add": [1, 3.0]}}


@pytest.mark.slow
def test_a_model_of_the_grid_is_timed_in_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant has its times and its memory, and nothing is left for the next model."""
    from real.gpu import bench

    changes: dict[str, Any] = {
        **host.SMALL, "num_layers": 1, "num_microbatches": 2, "hidden_size": 32, "seq_length": 32
    }  # fmt: skip
    scenario = load_scenario(CONFIG).changed(**changes)

    def body() -> Any:  # noqa: ANN401
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12)
        variants = ("no_fsdp_plain", "mfsdp_combined_dw")
        return bench._time_variants(
            scenario,
            variants,
            repeats=1,
            hosted=RELEASED,
            seat=None,
            warmup=0,
            on_progress=lambda _: None,
        )

    # Here all ranks share what is watched; the test after this one has one rank watch.
    monkeypatch.setattr(bench, "_host_costs", lambda job, step: {})
    for results in run_in_world(body):
        assert list(results) == ["no_fsdp_plain", "mfsdp_combined_dw"]
        for values in results.values():
            assert 0 < values["min_ms"] <= values["step_ms"] <= values["max_ms"]
            assert values["peak_bytes_above_rest"] == 5
            assert values["peak_bytes_by_rank"] == [5, 5]


@pytest.mark.slow
def test_hooks_and_units_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units as often as the schedule has them, and the hooks are themselves again after."""
    from real.gpu.jobs import make_job
    from real.hooks.weak import WeakHook

    changes: dict[str, Any] = {
        **host.SMALL, "num_layers": 1, "num_microbatches": 2, "hidden_size": 32, "seq_length": 32
    }  # fmt: skip
    scenario = load_scenario(CONFIG).changed(**changes)
    calls = {kind: kind.__dict__["__call__"] for kind in host._hook_types(WeakHook)}
    assert len(calls) > 4

    def body() -> Any:  # noqa: ANN401
        job = make_job(scenario, "mfsdp_combined")
        job.forward_backward(0)
        job.clear_gradients()
        if current_rank():
            return job.forward_backward(1)
        return host.time_hooks_and_units(lambda: job.forward_backward(1))

    monkeypatch.setattr(host, "Stopwatch", FirstRanksStopwatch)
    found = run_in_world(body)[0]
    units = 3  # root, layer, experts
    assert found["reduce"]["count"] == found["reduce last"]["count"] == units
    assert found["reshard"]["count"] == found["unshard gathered"]["count"]
    assert found["hook"]["count"] > 20
    assert all(cost["own_us"] > 0 for cost in found.values())
    assert {kind: kind.__dict__["__call__"] for kind in calls} == calls


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("variant", ["no_fsdp_combined", "mfsdp_combined"])
def test_a_job_that_is_dropped_leaves_no_memory(variant: str) -> None:
    """Or the models of a grid fill the GPU: with data parallel all of them stayed."""
    import gc
    import weakref

    from real.gpu.jobs import make_job

    changes: dict[str, Any] = {
        **host.SMALL, "num_layers": 1, "num_microbatches": 2, "hidden_size": 32, "seq_length": 32
    }  # fmt: skip
    scenario = load_scenario(CONFIG).changed(**changes)

    def body() -> int:
        job: Any = make_job(scenario, variant)
        job.forward_backward(0)
        job.clear_gradients()
        kept = [weakref.ref(weight) for weight in job.model.module.parameters()]
        job.release()
        del job
        gc.collect()
        left = [weight for weight in (weak() for weak in kept) if weight is not None]
        return sum(weight.untyped_storage().nbytes() for weight in left)

    assert run_in_world(body) == [0, 0]


def test_rounds_of_a_grid_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report holds all rounds so far, and the median is over all of their steps."""
    from contextlib import nullcontext

    from real.gpu import bench

    scenario = load_scenario(CONFIG)
    found = iter((1.0, 10.0, 3.0, 30.0, 2.0, 20.0))

    def one(*_: object, **__: object) -> bench.Results:
        return {"mfsdp_plain": {**bench._summary([next(found)]), "rest_bytes": 7}}

    monkeypatch.setattr(bench, "_time_variants", one)
    monkeypatch.setattr(bench, "gpu_world", lambda *_, **__: nullcontext())
    reports: list[tuple[str, Any]] = []
    bench.run_grid(
        {"a": scenario, "b": scenario},
        ["mfsdp_plain"],
        repeats=1,
        rounds=3,
        report=lambda name, results: reports.append((name, results["mfsdp_plain"])),
    )
    assert [name for name, _ in reports] == ["a", "b"] * 3
    last = dict(reports)
    assert last["a"]["all_ms"] == [1.0, 3.0, 2.0]
    assert (last["a"]["step_ms"], last["b"]["step_ms"]) == (2.0, 20.0)
    assert (last["a"]["min_ms"], last["a"]["max_ms"], last["a"]["rest_bytes"]) == (1.0, 3.0, 7)
