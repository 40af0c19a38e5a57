"""The rules that single cases need: each finds its fault in a story and is silent without it."""

from __future__ import annotations

import pytest
import torch

from sim.cases.judges import check_budget, check_demand, check_equal, check_last
from sim.cases.judges_memory import check_kept_gradients, check_reduce_inputs
from sim.cases.judges_overlap import check_coverage, check_exposed, check_queued
from tests.checks.stories import story

WEIGHT = {"layers.0.w": torch.ones(2)}


def test_a_flag_that_is_true_too_early_is_named() -> None:
    """Stories reduce with the flag set: right for the last reduction of a window alone."""
    once = "step begin 0\n0: reduce layers.0\nstep end 0\n"
    assert check_last([story(once * 2)]) == []
    [found] = check_last([story("step begin 0\n0: reduce layers.0\n0: reduce layers.0")])
    assert (found.rule, found.unit, found.seq) == ("I13", "layers.0", 2)


def test_a_hook_that_gathers_the_unit_around_its_own_is_named() -> None:
    """The nearest unit is the owner; the root is around everything."""
    units = "unit layers.0\nunit layers.0.experts\n"
    assert check_demand([story(units + "hook pre_forward layers.0.mlp of layers.0")]) == []
    [found] = check_demand([story(units + "hook pre_forward layers.0.experts of layers.0")])
    assert (found.rule, found.unit) == ("I15", "layers.0.experts")


REDUCED = """
    node attn backward layers.1 0
    0: mm 1 2 -> 3
    1: wait stream 0
    1: reduce_scatter of layers.1 3 -> 4
"""
MORE = "end attn backward\nnode mlp backward layers.0 0\n0: mm 5 6 -> 7\n"


@pytest.mark.parametrize(
    ("text", "is_exposed"),
    [
        (REDUCED + "0: wait stream 1\n" + MORE, True),
        (REDUCED + MORE + "0: wait stream 1\n", False),
        (REDUCED + "0: mm 5 6 -> 7\n0: wait stream 1\n" + MORE, False),
        (REDUCED + "0: wait stream 1\n0: grad_read", False),
    ],
    ids=["at once", "after the next node", "after a kernel", "at the end"],
)
def test_a_reduction_is_exposed_when_nothing_runs_before_the_wait(
    text: str, is_exposed: bool
) -> None:
    """At the end of a step there is nothing left to hide it."""
    found = check_exposed([story(text)])
    assert [(v.rule, v.unit) for v in found] == [("overlap", "layers.1")] * is_exposed


@pytest.mark.parametrize(
    ("gather", "is_queued"),
    [
        ("1: all_gather of layers.0 in ag 8 -> 9", True),
        ("2: all_gather of layers.0 8 -> 9", True),
        ("2: all_gather of layers.0 in ag 8 -> 9", False),
        ("0: wait stream 1\n2: all_gather of layers.0 8 -> 9", False),
    ],
    ids=["same stream", "same communicator", "neither", "after a wait"],
)
def test_a_gather_is_queued_behind_a_reduction_that_is_under_way(
    gather: str, is_queued: bool
) -> None:
    """A communicator runs its calls in launch order, whatever their streams."""
    found = check_queued([story(REDUCED + gather)])
    assert [(v.rule, v.unit) for v in found] == [("overlap", "layers.0")] * is_queued


def test_a_run_without_interleaved_nodes_covers_nothing() -> None:
    """Story nodes have no phase."""
    trace = story("node attn forward layers.0 0")
    assert [v.rule for v in check_coverage([trace])] == ["coverage"]
    trace.records[0]["phase"] = "steady"
    assert check_coverage([trace]) == []


def test_full_gradients_of_another_unit_are_kept() -> None:
    """A gradient that is freed before the next unit is complete is not."""
    kept = "name 1 layers.1:full gradient\n{}name 2 layers.0:full gradient"
    assert check_kept_gradients([story(kept.format("free 1\n"))]) == []
    [found] = check_kept_gradients([story(kept.format(""))])
    assert (found.rule, found.unit) == ("I20", "layers.1")


def test_a_reduce_input_larger_than_the_largest_layer_is_named() -> None:
    """Story collectives have 64 bytes."""
    reduction = "1: reduce_scatter of out 3 -> 4"
    assert check_reduce_inputs([story(f"unit decoder.layers.0 bytes 64\n{reduction}")]) == []
    [found] = check_reduce_inputs([story(f"unit decoder.layers.0 bytes 32\n{reduction}")])
    assert (found.rule, found.unit) == ("I20", "out")


def test_other_weights_than_on_rank_0_are_named() -> None:
    """By parameter and rank."""
    assert check_equal([WEIGHT, WEIGHT]) == []
    [found] = check_equal([WEIGHT, {"layers.0.w": torch.zeros(2)}])
    assert (found.rule, found.rank, found.unit) == ("init", 1, "layers.0")


def test_a_hook_over_its_budget_is_named() -> None:
    """One call more is too many."""
    assert check_budget(0, {("pre_forward of a", "layers.0"): 5}, 5) == []
    [found] = check_budget(0, {("pre_forward of a", "layers.0"): 6}, 5)
    assert (found.rule, found.unit, found.hook) == ("budget", "layers.0", "pre_forward of a")
