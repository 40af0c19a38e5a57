"""Knobs, rewrites, bands and the command lines of the timing model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import Rank, layer_trace, write_traces

from sim.cli import main
from sim.timing.answers import plot
from sim.timing.answers.rewrite import Rewrite
from sim.timing.answers.variants import KNOBS, KnobError, Variant, parse_setting
from sim.timing.answers.whatif import Grid, judge, what_if
from sim.timing.costs.costfile import load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.program import ReplayError
from sim.timing.replay.timeline import replay

CLUSTER = load_cluster("h200")


# -- knobs ------------------------------------------------------------------------------------


def test_knobs_that_are_asked_for_exist() -> None:
    wanted = {
        "prefetch", "comm-stream", "communicator", "event", "delay-wgrad", "num-microbatches",
        "ep", "dp", "link-bandwidth", "link-latency", "host-cost", "imbalance", "straggler",
        "sm-contention", "connections",
    }  # fmt: skip
    assert wanted <= set(KNOBS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefetsch=none", "got 'prefetsch=none'. Did you mean 'prefetch'?"),
        ("prefetch=some", "Expected one of none, forward, both for prefetch, got 'some'."),
        ("connections=0", "Expected a whole number of 1 or more for connections, got '0'."),
        ("link-bandwidth=-1", "Expected a factor above 0 for link-bandwidth, got '-1'."),
        ("sm-contention=0.5", "Expected a factor of 1 or more for sm-contention, got '0.5'."),
        ("link-latency=fast", "Expected a number for link-latency, got 'fast'."),
        ("delay-wgrad=perhaps", "Expected on or off for delay-wgrad, got 'perhaps'."),
        ("straggler-rank=x", "Expected a whole number of 0 or more for straggler-rank, got 'x'."),
        ("event", "Expected one of recorded, shared, per_direction for event, got ''."),
    ],
)
def test_a_bad_setting_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(KnobError) as caught:
        parse_setting(text)
    assert message in str(caught.value)


def test_a_setting_keeps_the_order_of_its_values() -> None:
    assert parse_setting("link-bandwidth=2,0.5,2") == ("link-bandwidth", [2.0, 0.5])
    assert str(Variant(values={"delay-wgrad": True, "ep": 4})) == "delay-wgrad=on ep=4"


def grid(**settings: list[Any]) -> Grid:
    named = {name.replace("_", "-"): values for name, values in settings.items()}
    return Grid(traces=layer_trace(2), cluster=CLUSTER, settings=named)


def test_two_settings_make_a_grid_after_the_base() -> None:
    rows = what_if(grid(link_bandwidth=[1.0, 0.1], straggler=[1.0, 2.0]), jobs=1)
    assert [str(row.variant) for row in rows] == [
        "",
        "link-bandwidth=1 straggler=1",
        "link-bandwidth=1 straggler=2",
        "link-bandwidth=0.1 straggler=1",
        "link-bandwidth=0.1 straggler=2",
    ]
    assert [row.verdict for row in rows] == [
        "base", "too close to call", "slower", "slower", "slower",
    ]  # fmt: skip
    assert rows[1].difference_ms == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # torch may have threads
def test_processes_change_nothing() -> None:
    asked = grid(host_cost=[0.5, 1.0, 4.0])
    assert what_if(asked, jobs=2) == what_if(asked, jobs=1)


@pytest.mark.parametrize(
    ("settings", "is_slower"),
    [
        ({"link_latency": [20.0]}, True),
        ({"host_cost": [20.0]}, True),
        ({"sm_contention": [4.0]}, True),
        ({"imbalance": [2.0]}, True),
        ({"straggler": [3.0]}, True),
        ({"dp": [64]}, True),
        ({"connections": [8]}, False),
        ({"queue_depth": [1024]}, False),
    ],
)
def test_a_knob_reaches_the_replay(settings: dict[str, list[Any]], is_slower: bool) -> None:
    # A quick host, so that kernels and collectives run side by side.
    quick = replace(grid(**settings), cluster=CLUSTER.scaled(host=0.1))
    row = what_if(quick, jobs=1)[1]
    assert (row.difference_ms > 0) is is_slower


def test_differences_under_two_percent_are_never_called() -> None:
    variants = [Variant(values={"connections": n}) for n in range(1, 5)]
    numbers = [{"step_ms": ms} for ms in (100.0, 101.9, 97.8, 110.0)]
    sure = CLUSTER.changed(step_error=0.0, difference_error=0.0)
    assert [row.verdict for row in judge(sure, variants, numbers)] == [
        "base", "too close to call", "faster", "slower",
    ]  # fmt: skip
    unsure = CLUSTER.changed(step_error=0.1, difference_error=0.08)
    rows = judge(unsure, variants, numbers)
    assert [row.verdict for row in rows][1:] == ["too close to call"] * 2 + ["slower"]
    assert rows[3].difference_band_ms == pytest.approx(8 + 1)


def test_a_scenario_that_does_not_fit_is_told_before_anything_runs() -> None:
    from real.config import Scenario, ScenarioError

    whole = Scenario(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, seq_length=16,
        vocab_size=64, num_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2, world_size=2,
        expert_model_parallel_size=2,
    ).as_dict()  # fmt: skip
    traces = [Rank(rank, 2).trace(whole) for rank in range(2)]
    asked = Grid(traces=traces, cluster=CLUSTER, settings={"ep": [2, 3]})
    with pytest.raises(ScenarioError, match="got 2 and 3"):
        what_if(asked, jobs=1)


# -- rewrites ---------------------------------------------------------------------------------


def test_unified_streams_put_reductions_behind_gathers() -> None:
    traces = Rewrite(streams="unified").apply(layer_trace(2))
    streams = {r["stream"] for r in traces[0].records if r["op"] == "collective" and r["unit"]}
    assert streams == {2}
    with pytest.raises(ReplayError, match="on separate streams, got one with both on one"):
        Rewrite(streams="separate").apply(traces)


def test_separate_streams_of_a_trace_that_has_them_change_nothing() -> None:
    traces = layer_trace(2)
    assert Rewrite(streams="separate").apply(traces) == traces


def test_separate_communicators_let_a_reduction_and_a_gather_run_at_once() -> None:
    def begins(communicators: str) -> list[int]:
        ranks = []
        for number in range(2):
            story = Rank(number, 2)
            story.group("g", 0, 1)
            story.step()
            story.collective("g", 0, "reduce_scatter", stream=3)
            story.collective("g", 1, "all_gather", stream=2)
            story.done()
            ranks.append(story.trace())
        traces = Rewrite(communicators=communicators).apply(ranks)
        model = CostModel(CLUSTER.scaled(host=0.0))
        return replay(traces, model).times.begins

    together, apart = begins("recorded"), begins("separate")
    assert together[1] > together[0]
    assert apart[1] == apart[0]


def test_shared_communicators_are_not_made_of_separate_ones() -> None:
    traces = layer_trace(2)
    assert Rewrite(communicators="shared").apply(traces) == traces
    apart = Rewrite(communicators="separate").apply(traces)
    with pytest.raises(ReplayError, match="on shared communicators, got one with separate ones"):
        Rewrite(communicators="shared").apply(apart)


def two_directions() -> Rank:
    """A backward and a forward node whose events do not meet."""
    story = Rank()
    story.step()
    for direction, microbatch, event in (("backward", 0, 0), ("forward", 1, 1)):
        story.node("mlp", direction, microbatch=microbatch)
        story.event_wait(0, event, None)
        story.event_record(0, event)
        story.node_end("mlp", direction)
    story.node("moe_dispatch", "backward", microbatch=0)
    story.event_wait(4, 0, 4)
    story.node_end("moe_dispatch", "backward")
    story.done()
    return story


def waited_for(events: str) -> int | None:
    records = Rewrite(events=events).apply([two_directions().trace()])[0].records
    found: int | None = [r for r in records if r["op"] == "event_wait"][-1]["record"]
    return found


def test_one_shared_event_makes_a_node_wait_for_the_other_direction() -> None:
    assert waited_for("recorded") == waited_for("per_direction") == 4
    assert waited_for("shared") == 8


def test_events_by_direction_undo_a_shared_one() -> None:
    shared = Rewrite(events="shared").apply([two_directions().trace()])
    undone = Rewrite(events="per_direction").apply(shared)[0].records
    assert [r for r in undone if r["op"] == "event_wait"][-1]["record"] == 4


# -- commands ---------------------------------------------------------------------------------


Sim = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Sim:
    def call(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    folder = tmp_path / "trace"
    write_traces(folder, layer_trace(4))
    return folder


def test_time_prints_one_json_object(sim: Sim, trace: Path) -> None:
    status, out, err = sim("time", trace, "--cluster", "h100", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert {
        "step_ms", "exposed_comm_ms", "a2a_hidden", "fsdp_comm_hidden", "host_bound", "peak_bytes",
        "wall_s", "critical_path", "streams",
    } <= set(found)  # fmt: skip
    assert found["ranks"] == 4
    assert found["timed_ranks"] == 1
    assert 0 < len(found["critical_path"]) <= 10
    low, high = found["step_ms_band"]
    assert low < found["step_ms"] < high


def test_time_prints_a_report(sim: Sim, trace: Path) -> None:
    status, out, _ = sim("time", trace, "--ranks", "1024")
    assert status == 0
    assert "1024 ranks, 1 timed in place of all" in out
    assert "critical path, largest items" in out


def test_time_needs_shapes(sim: Sim, tmp_path: Path) -> None:
    story = Rank()
    story.step()
    del story.records[story.kernel() - 1]["shapes"]
    story.done()
    write_traces(tmp_path / "bare", [story.trace()])
    status, out, err = sim("time", tmp_path / "bare")
    assert (status, out) == (2, "")
    assert err == (
        "sim: Expected kernels with shapes in the trace, got none; `python -m sim run "
        "--shapes-only` records them.\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("time", "--cluster", "h900"), "Expected a cost file or one of"),
        (("time", "--ranks", "6"), "a multiple of the trace's 4 ranks, got 6"),
        (("time", "--step", "3"), "Expected step 3 in the trace of rank 0, got 0."),
        (("whatif",), "Expected at least one --set KNOB=VALUE,..., got none."),
        (("whatif", "--set", "hots-cost=1"), "Did you mean 'host-cost'?"),
        (("whatif", "--set", "host-cost=1", "--jobs", "0"), "--jobs of 1 or more, got 0."),
        (("whatif", "--set", "host-cost=1", "--plot", "a.pdf"), "to end in .svg or .png"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    sim: Sim, trace: Path, words: tuple[str, ...], message: str
) -> None:
    status, out, err = sim(words[0], trace, *words[1:])
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_whatif_prints_a_table_and_json(sim: Sim, trace: Path) -> None:
    settings = ("--set", "link-bandwidth=0.05,1", "--jobs", "1")
    status, out, _ = sim("whatif", trace, *settings)
    assert status == 0
    assert "link-bandwidth=0.05" in out
    assert "slower" in out
    assert "too close to call" in out
    _, out, _ = sim("whatif", trace, *settings, "--json")
    rows = json.loads(out)["rows"]
    assert [row["knobs"] for row in rows] == [{}, {"link-bandwidth": 0.05}, {"link-bandwidth": 1}]


def test_a_plot_needs_matplotlib(sim: Sim, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    status, _, err = sim("whatif", trace, "--set", "host-cost=1", "--plot", "a.svg")
    assert status == 2
    assert err == (
        "sim: Expected matplotlib for --plot, got none; `.venv/bin/pip install matplotlib`.\n"
    )


def test_a_plot_is_drawn(sim: Sim, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plot.svg"
    settings = ("--set", "host-cost=1,2,4", "--set", "straggler=1,2", "--jobs", "1")
    assert sim("whatif", trace, *settings, "--plot", target)[0] == 0
    assert "<svg" in target.read_text()
    assert plot.FORMATS == (".svg", ".png")


@pytest.mark.slow
def test_a_scenario_knob_runs_the_scenario_again(sim: Sim, tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    small = (
        "--num-layers", "1", "--num-microbatches", "2", "--world-size", "2",
        "--transformer-impl", "transformer_engine",
    )  # fmt: skip
    assert sim("run", "--shapes-only", *small, "--out", folder)[0] == 0
    _, out, _ = sim("time", folder, "--json")
    assert json.loads(out)["host_bound"] > 0.9
    settings = ("--set", "num-microbatches=2,3", "--jobs", "1", "--json")
    status, out, err = sim("whatif", folder, *settings)
    assert (status, err) == (0, "")
    base, same, more = json.loads(out)["rows"]
    assert same["difference_ms"] == 0
    assert base["verdict"] == "base"
    assert more["verdict"] == "slower"
