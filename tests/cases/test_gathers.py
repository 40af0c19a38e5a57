"""Checks of single cases on gathers and lifetimes: each has a good and a bad story."""

from __future__ import annotations

from sim.cases.gathers import (
    check_frozen,
    check_gathers,
    check_late_readers,
    check_loss_inputs,
    check_ranges,
    check_reductions,
)
from sim.cases.ordering import check_gather_overlap, check_wgrad_start
from tests.checks.stories import story

ONE = {"num_microbatches": 1}


def test_a_read_after_the_release_is_a_release_before_the_last_reader() -> None:
    """Unless a gather has brought the weight back in between."""
    released = "name 7 a:full weight\n1: resize 7 64 0\n"
    assert check_late_readers([story(released + "1: resize 7 0 64\n0: mm 7 -> 8")]) == []
    [found] = check_late_readers([story(released + "node mlp backward a 1\n0: mm 7 -> 8")])
    assert (found.rule, found.unit, found.node, found.microbatch) == (
        "I4",
        "a",
        "mlp backward of a",
        1,
    )


def test_gathers_are_counted_both_ways() -> None:
    """One too many is I2 where it happens, one too few is I12 at the end of the step."""
    step = "step begin 0\n1: unshard a\n1: reshard a\n1: unshard a\n1: reshard a\nstep end 0"
    traces = [story(step, scenario=ONE)]
    assert check_gathers(traces, most=2, least=2) == []
    assert check_gathers(traces, most=1, extra=1) == []
    [found] = check_gathers(traces, most=1)
    assert (found.rule, found.unit, found.seq) == ("I2", "a", 4)
    [found] = check_gathers(traces, most=3, least=3)
    assert (found.rule, found.unit) == ("I12", "a")
    assert check_gathers(traces, most=1, units=["b"]) == []


def test_a_taken_unit_is_no_gather() -> None:
    """Hooks ask many times and gather once."""
    traces = [story("step begin 0\n1: unshard a\n1: again a\n1: again a", scenario=ONE)]
    assert check_gathers(traces, most=1) == []


def test_a_reduction_outside_of_every_node_counts_too() -> None:
    """The second one of a window may come from the end of a combined step."""
    step = "unit a\nunit b frozen\nstep begin 0\n0: reduce a\n{}step end 0"
    assert check_reductions([story(step.format(""), scenario=ONE)]) == []
    [found] = check_reductions([story(step.format("0: reduce a\n"), scenario=ONE)])
    assert (found.rule, found.unit) == ("I5", "a")


LOSS = """
    node post_process forward - 0
    0: allocate 9 64
    0: mm 1 -> 9
    end post_process forward
    node pre_process backward - 0
    end pre_process backward
    {}
    0: grad_read
"""


def test_what_the_last_node_made_is_gone_after_its_backward() -> None:
    """Freed, or resized to nothing after the step."""
    story_text = LOSS.replace("- 0", "None 0")
    good = story(story_text.format("free 9"))
    bad = story(story_text.format("host waits device"))
    for trace in (good, bad):
        for record in trace.records:
            if record["op"] == "node":
                record["layer"] = None  # these two nodes are in no layer
    assert check_loss_inputs([good]) == []
    [found] = check_loss_inputs([bad])
    assert (found.rule, found.unit, found.node) == ("I20", "<root>", "pre_process backward")


def test_a_frozen_unit_goes_with_its_layer_in_cooldown() -> None:
    """In steady state another microbatch may be in its forward."""
    lines = [
        "unit decoder.layers.1 frozen",
        "node pre_dispatch_computation backward layer_2 0",
        "1: unshard decoder.layers.1",
        "end pre_dispatch_computation backward",
        "1: reshard decoder.layers.1",
        "node mlp backward layer_1 0",
    ]

    def found(phase: str, *, is_released: bool) -> list[str | None]:
        trace = story("\n".join(line for line in lines if is_released or "reshard" not in line))
        for record in trace.records:
            if record["op"] == "node":
                record["layer"] = record["layer"].replace("_", " ")
                record["phase"] = phase
        return [violation.unit for violation in check_frozen([trace])]

    assert found("cooldown", is_released=True) == []
    assert found("steady", is_released=False) == []
    assert found("cooldown", is_released=False) == ["decoder.layers.1"]


def test_a_profiler_range_that_stays_open_names_its_unit() -> None:
    """The text is MFSDP's own: the name comes second."""
    assert check_ranges([story("step begin 0\npush a\npop\nstep end 0")]) == []
    trace = story("step begin 0\npush text\nstep end 0")
    trace.records[1]["text"] = "MFSDP layers.0 forward"
    [found] = check_ranges([trace])
    assert (found.rule, found.unit, found.seq) == ("I18", "layers.0", 2)


GATHER = """
    hook pre_forward a
    1: all_gather of a 6 -> 7
    1: record 5
    {}
    0: mm 7 -> 8
"""


def test_a_gather_runs_ahead_when_kernels_are_launched_before_the_wait() -> None:
    """A wait right behind the gather leaves nothing that could run beside it."""
    ahead = story(GATHER.format("0: mm 1 -> 2\n0: wait 5"))
    behind = story(GATHER.format("0: wait 5\n0: mm 1 -> 2"))
    assert check_gather_overlap([ahead], units=["a"]) == []
    [found] = check_gather_overlap([behind], units=["a"])
    assert (found.rule, found.unit, found.seq) == ("overlap", "a", 2)
    assert check_gather_overlap([behind], units=["b"]) == []


WGRAD = """
    node shared forward a 0
    3: mm 1 -> 2
    end shared forward
    node mlp backward a 0
    0: mm 4 -> 5
    end mlp backward
    2: wait stream 0
    {}
    node mlp wgrad a 0
    2: mm 5 -> 6
"""


def test_a_weight_gradient_waits_for_its_input_gradient_alone() -> None:
    """Work of a third stream may take longer than the input gradient."""
    assert check_wgrad_start([story(WGRAD.format("host waits event 0"))]) == []
    [found] = check_wgrad_start([story(WGRAD.format("2: wait stream 3"))])
    assert (found.rule, found.unit, found.node) == ("overlap", "a", "mlp wgrad of a")
