"""A whole job of one rank whose peers are not there does what the simulation says it does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from real.config import Scenario, load_scenario
from real.gpu.loopback import LOSSES_MEAN_NOTHING, Seat
from real.gpu.recorder import GpuRecorder
from real.targets import RELEASED, Hosted, TargetError
from real.trace import MemorySink, Recorder, Trace, read_traces, trace_of, trace_path
from real.variants import variants_of
from sim.cuda import FakeDevice, use_device
from sim.diff import canonical_text
from sim.world import WorldError
from tests.conformance.conftest import CONFIGS, ROOT
from tests.conformance.test_conformance import GOLDEN, NAMES, differences
from tests.conformance.test_four_ranks import CONFIGS as FOUR_CONFIGS
from tests.conformance.test_four_ranks import GOLDEN as FOUR_GOLDEN
from tests.conformance.test_four_ranks import NAMES as FOUR_NAMES
from tests.conformance.test_four_ranks import seen_from

if TYPE_CHECKING:
    from real.gpu.trace import TraceResult


def record_alone(
    scenarios: Mapping[Path, Scenario],
    seat: Seat,
    monkeypatch: pytest.MonkeyPatch,
    hosted: Hosted = RELEASED,
) -> dict[Path, TraceResult]:
    """Runs what `real trace` runs, on a fake device that itself records nothing."""
    from sim.quiet import quiet
    from sim.session.megatron import megatron_on_fake_cuda

    results: dict[Path, TraceResult] = {}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        quiet()
        stack.enter_context(megatron_on_fake_cuda(hosted.tree))
        from real.gpu import trace, world
        from sim.session.world import make_world

        monkeypatch.setattr(world, "preflight", lambda *_: None)
        monkeypatch.setattr(trace, "GpuRecorder", partial(GpuRecorder, priority=lambda _: 0))

        def body(_: int) -> None:
            with use_device(FakeDevice(0, Recorder())):
                results.update(trace.run_traces(scenarios, hosted=hosted, seat=seat))

        # A world of one, so that process-wide state is back to what it was at the end.
        make_world(1).run(body)
    return results


def only_trace(folder: Path) -> Trace:
    (trace,) = read_traces(folder)
    assert trace.is_complete
    assert trace.peers == "loopback"
    return trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0 of 2 of every conformance scenario, one after the other in one world."""
    out = tmp_path_factory.mktemp("alone")
    scenarios = {out / name: load_scenario(CONFIGS / f"{name}.toml") for name in NAMES}
    with pytest.MonkeyPatch.context() as monkeypatch:
        results = record_alone(scenarios, Seat(0, 2), monkeypatch)
    assert list(results) == list(scenarios)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rank_0_of_2_alone_does_what_its_golden_trace_says(name: str, folder: Path) -> None:
    """The same hooks, units, nodes, calls and waits, in the same order."""
    trace = only_trace(folder / name)
    assert (trace.rank, trace.world_size) == (0, 2)
    assert differences((GOLDEN / f"{name}.txt").read_text(), trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_4_alone_does_what_its_golden_trace_says(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are those of its number."""
    name = "ep2-dp2-hybrid"
    scenario = load_scenario(FOUR_CONFIGS / f"{name}.toml")
    (result,) = record_alone({tmp_path: scenario}, Seat(rank, 4), monkeypatch).values()
    golden = (FOUR_GOLDEN / f"{name}.txt").read_text()
    assert differences(seen_from(rank, golden), only_trace(tmp_path)) == []
    assert all(map(isfinite, result.losses))  # whatever the padding of its shards held
    assert result.text() == f"{result.num_records} records of rank {rank}, {LOSSES_MEAN_NOTHING}"
    told = result.as_dict()
    assert (told["peers"], told["rank"], told["note"]) == ("loopback", rank, LOSSES_MEAN_NOTHING)


def simulated(scenario: Scenario, target: str) -> list[Trace]:
    """Returns what `sim run --target` records of every rank."""
    from sim.quiet import quiet
    from sim.session.megatron import megatron_on_fake_cuda
    from sim.session.rank import RankPlan
    from sim.session.subject import find_subject
    from sim.session.world import make_world, train

    sinks = [MemorySink() for _ in range(scenario.world_size)]
    with warnings.catch_warnings():
        quiet()
        with megatron_on_fake_cuda():
            plan = RankPlan(subject=find_subject(target))
            train(make_world(scenario.world_size), scenario, plan, sinks=sinks)
    return [trace_of(sink.records) for sink in sinks]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mfsdp1", "mfsdp1:optim_grads"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_another_target_alone_does_what_the_simulation_says(
    target: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own hooks; the header says whose."""
    scenario = load_scenario(CONFIGS / "combined-2-delayed.toml").changed(num_layers=2)
    expected = simulated(scenario, target)[rank]
    record_alone({tmp_path: scenario}, Seat(rank, 2), monkeypatch, Hosted(target))
    trace = only_trace(tmp_path)
    assert differences(canonical_text(expected), trace) == []
    assert len(canonical_text(expected).splitlines()) > 400
    for field in ("target", "megatron"):
        assert trace.header[field] == expected.header[field]
    assert trace.header["target"] == target


@pytest.mark.slow
def test_one_rank_is_judged_and_compared_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder has no file of its peers, whom the simulation has."""
    from sim.cli import main

    name = "combined-2-delayed"
    assert main(["check", str(folder / name)]) == 0
    assert "0 violations in" in capsys.readouterr().out
    scenario = str(CONFIGS / f"{name}.toml")
    assert main(["run", scenario, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    for pair in ((tmp_path, folder / name), (folder / name, tmp_path)):
        assert main(["diff", "--canonical", *map(str, pair)]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.fullmatch(r"equal: \d{4} lines of 1 ranks", last)


@pytest.mark.slow
def test_the_bench_times_one_rank_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without FSDP; memory is that of the rank that is there."""
    found = bench_alone(Seat(5, 8), ["no_fsdp_combined", "mfsdp_plain"], monkeypatch)
    assert list(found) == ["no_fsdp_combined", "mfsdp_plain"]
    for values in found.values():
        assert values["step_ms"] > 0
        assert values["peak_bytes_by_rank"] == [5]
        assert values["world_size"] == 8
        assert (values["peers"], values["rank"]) == ("loopback", 5)


@pytest.mark.slow
def test_the_bench_times_another_target_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target's own variant holds for its kind; our hooks' costs are ours alone."""
    names = [*variants_of("mfsdp1"), "mfsdp_combined"]
    found = bench_alone(Seat(0, 2), names, monkeypatch, Hosted("mfsdp1:optim_grads"))
    assert list(found) == ["mfsdp1_plain", "mfsdp1_combined", "mfsdp_combined"]
    assert all(values["step_ms"] > 0 for values in found.values())
    targets = [values.get("target") for values in found.values()]
    assert targets == ["mfsdp1:optim_grads", "mfsdp1:optim_grads", None]
    assert [bool(values["host"]) for values in found.values()] == [False, False, True]


@pytest.mark.slow
def test_the_bench_refuses_a_tree_that_a_target_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The release has no wrapper that joins MFSDP v2 itself."""
    with pytest.raises(WorldError) as raised:
        bench_alone(Seat(0, 2), ["native_combined"], monkeypatch)
    assert isinstance(raised.value.__cause__, TargetError)
    assert "that target 'native' fits, got one without megatron." in str(raised.value.__cause__)


def bench_alone(
    seat: Seat, variants: list[str], monkeypatch: pytest.MonkeyPatch, hosted: Hosted = RELEASED
) -> dict[str, dict[str, Any]]:
    """Runs what `real bench` runs, on a fake device of small memory."""
    import torch

    from sim.quiet import quiet
    from sim.session.megatron import megatron_on_fake_cuda

    found: dict[str, dict[str, Any]] = {}
    scenario = load_scenario(CONFIGS / "combined-1.toml").changed(world_size=seat.world_size)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        quiet()
        stack.enter_context(megatron_on_fake_cuda(hosted.tree))
        from real.gpu import bench, world
        from sim.session.world import make_world

        monkeypatch.setattr(world, "preflight", lambda *_: None)

        def body(_: int) -> None:
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12)
            with use_device(FakeDevice(0, Recorder())):
                timed = bench.run_bench(
                    scenario, variants, repeats=1, hosted=hosted, seat=seat, warmup=0
                )
                found.update(timed)

        make_world(1).run(body)
        monkeypatch.undo()
    return found


# -- on a GPU --------------------------------------------------------------------------------


def on_one_gpu(files: list[Path], out: Path, seat: Seat) -> None:
    command = [sys.executable, "-m", "real", "trace", *files, "--peers", "loopback"]
    command += ["--world-size", seat.world_size, "--rank", seat.rank, "--json"]
    run = subprocess.run(
        [*map(str, command), "--out", str(out), "--report", str(out / "standing")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.strip().splitlines()[-1])
    assert [result["note"] for result in told.values()] == [LOSSES_MEAN_NOTHING] * len(files)


@pytest.fixture(scope="module")
def gpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on one GPU."""
    out = tmp_path_factory.mktemp("one-gpu")
    on_one_gpu([CONFIGS / f"{name}.toml" for name in NAMES], out, Seat(0, 2))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_one_gpu_does_what_the_golden_trace_says(name: str, gpu_folder: Path) -> None:
    """Kernels, allocator and streams are real; only the exchange is missing."""
    trace = only_trace(gpu_folder / name)
    assert differences((GOLDEN / f"{name}.txt").read_text(), trace) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOUR_NAMES)
def test_one_gpu_is_rank_3_of_4(name: str, tmp_path: Path) -> None:
    """Two ranks are too few for experts' shards to travel."""
    on_one_gpu([FOUR_CONFIGS / f"{name}.toml"], tmp_path, Seat(3, 4))
    golden = (FOUR_GOLDEN / f"{name}.txt").read_text()
    assert trace_path(tmp_path, 3).exists()
    assert differences(seen_from(3, golden), only_trace(tmp_path)) == []
