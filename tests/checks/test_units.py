"""The life of units: each rule has a story that breaks it and a twin that keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks import Violation
from sim.checks.units import check_units

Story = Callable[..., Trace]


def _found(trace: Trace) -> list[tuple[str, str | None, int | None]]:
    return [(v.rule, v.unit, v.seq) for v in check_units([trace])]


# -- I1, I2, I3: gathered once, released once ------------------------------------------------


def test_a_gather_and_its_release_are_silent(story: Story) -> None:
    """As often as it takes, one after the other."""
    trace = story("""
        step begin 0
        1: unshard layers.0
        1: reshard layers.0
        1: unshard layers.0
        1: reshard layers.0
        step end 0
    """)
    assert _found(trace) == []


def test_a_second_gather_of_an_unsharded_unit_is_found(story: Story) -> None:
    """It is traffic for nothing, and it writes under the readers of the first."""
    trace = story("1: unshard layers.0\n1: unshard layers.0\n1: reshard layers.0")
    assert _found(trace) == [("I2", "layers.0", 2)]


def test_asking_for_an_unsharded_unit_again_is_no_second_gather(story: Story) -> None:
    """An unshard that finds the unit gathered launches nothing."""
    assert _found(story("1: unshard layers.0\n1: again layers.0\n1: reshard layers.0")) == []


def test_two_units_may_be_unsharded_at_the_same_time(story: Story) -> None:
    """Rules are for one unit."""
    trace = story("""
        1: unshard layers.0
        1: unshard layers.1
        1: reshard layers.0
        1: reshard layers.1
        step end 0
    """)
    assert _found(trace) == []


def test_a_unit_taken_as_unsharded_that_is_not_is_found(story: Story) -> None:
    """The forward would read a released buffer."""
    trace = story("1: unshard layers.0\n1: reshard layers.0\n1: again layers.0")
    assert _found(trace) == [("I1", "layers.0", 3)]


@pytest.mark.parametrize("event", ["begin", "end"])
def test_a_unit_left_unsharded_is_found_at_the_border_of_a_step(story: Story, event: str) -> None:
    """Nobody would release it: the next step's gather finds it done, with old weights."""
    assert _found(story(f"1: unshard layers.0\nstep {event} 0")) == [("I3", "layers.0", 2)]


def test_a_unit_left_unsharded_is_reported_once(story: Story) -> None:
    """The end of a step and the begin of the next are one border."""
    trace = story("1: unshard layers.0\nstep end 0\nstep begin 1\nstep end 1")
    assert _found(trace) == [("I3", "layers.0", 2)]


def test_a_second_release_is_found(story: Story) -> None:
    """The second one may hit a gather that was started in between."""
    trace = story("1: unshard layers.0\n1: reshard layers.0\n1: reshard layers.0")
    assert _found(trace) == [("I3", "layers.0", 3)]


# -- I5, I12: reduced once, by all -----------------------------------------------------------

REDUCED_TWICE = """
    node mlp backward layers.0 0
    1: reduce layers.0
    1: reduce layers.0
    end mlp backward
"""


def test_a_unit_reduced_twice_in_one_microbatch_is_found(story: Story) -> None:
    """Its gradient would count double."""
    [violation] = check_units([story(REDUCED_TWICE)])
    assert (violation.rule, violation.unit, violation.microbatch, violation.seq) == (
        "I5",
        "layers.0",
        0,
        3,
    )


def test_a_unit_reduced_three_times_is_reported_once(story: Story) -> None:
    """The third is the same fault."""
    third = REDUCED_TWICE.replace("end", "1: reduce layers.0\nend")
    assert [v.rule for v in check_units([story(third)])] == ["I5"]


def test_reductions_outside_of_nodes_are_of_no_microbatch(story: Story) -> None:
    """The plain schedule runs no nodes, and reduces in every microbatch."""
    assert _found(story("1: reduce layers.0\n1: reduce layers.0")) == []


@pytest.mark.parametrize(
    "middle", ["end mlp backward\nnode mlp backward layers.0 1", "step begin 1"]
)
def test_a_unit_is_reduced_once_in_every_microbatch(story: Story, middle: str) -> None:
    """Microbatches are numbered anew in each step."""
    trace = story(f"""
        node mlp backward layers.0 0
        1: reduce layers.0
        {middle}
        1: reduce layers.0
        end mlp backward
    """)
    assert _found(trace) == []


def test_two_units_are_reduced_in_one_microbatch(story: Story) -> None:
    """The count is a unit's own."""
    other = REDUCED_TWICE.replace("reduce layers.0", "reduce layers.1", 1)
    assert _found(story(other)) == []


def test_ranks_reduce_a_unit_equally_often(story: Story) -> None:
    """The good twin: order is another check's affair."""
    one = story("1: reduce layers.0\n1: reduce layers.1")
    two = story("1: reduce layers.1\n1: reduce layers.0", rank=1)
    assert check_units([one, two]) == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1: reduce layers.1", (0, 1)),
        ("1: reduce layers.0\n1: reduce layers.1\nstep begin 1\n1: reduce layers.0", (2, 1)),
    ],
    ids=["one less", "one more"],
)
def test_a_rank_that_reduces_another_number_of_times_is_found(
    story: Story, text: str, counts: tuple[int, int]
) -> None:
    """Its partners would wait forever, or pair the call with another unit's."""
    one = story("1: reduce layers.0\n1: reduce layers.1")
    assert check_units([one, story(text, rank=1)]) == [
        Violation(
            rule="I12",
            rank=1,
            message=f"Unit layers.0 is reduced {counts[0]} times here and {counts[1]} times on "
            "rank 0.",
            unit="layers.0",
        )
    ]


# -- I8, I9: around the optimizer ------------------------------------------------------------


@pytest.mark.parametrize("reader", ["optimizer", "grad_read"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    ("join", "rules"),
    [("", ["I8"]), ("0: wait 5", []), ("0: wait stream 1", []), ("host waits device", [])],
    ids=["no join", "event", "stream", "host"],
)
def test_gradients_are_read_after_their_last_reduction(
    story: Story, reader: str, kind: str, join: str, rules: list[str]
) -> None:
    """The optimizer and the gradient norm alike."""
    trace = story(f"""
        1: {kind} of layers.0 6 -> 7
        1: record 5
        {join}
        0: {reader}
    """)
    assert [v.rule for v in check_units([trace])] == rules


def test_every_unit_whose_reduction_is_open_is_named(story: Story) -> None:
    """A join of the first reduction does not cover the second."""
    trace = story("""
        1: reduce_scatter of layers.1 6 -> 7
        0: wait stream 1
        1: reduce_scatter of layers.0 8 -> 9
        0: grad_read
    """)
    assert _found(trace) == [("I8", "layers.0", 4)]


def test_a_collective_without_a_unit_is_no_gradient_reduction(story: Story) -> None:
    """The loss is reduced too."""
    assert _found(story("1: all_reduce 6 -> 6\n0: grad_read")) == []


@pytest.mark.parametrize(
    ("join", "rules"),
    [("", ["I9"]), ("1: wait 5", []), ("1: wait stream 0", []), ("host waits stream 0", [])],
    ids=["no join", "event", "stream", "host"],
)
def test_a_gather_comes_after_the_optimizer(story: Story, join: str, rules: list[str]) -> None:
    """Or it sends out weights of the step before."""
    trace = story(f"""
        0: optimizer
        0: record 5
        step begin 1
        {join}
        1: all_gather of layers.0 6 -> 7
    """)
    assert [v.rule for v in check_units([trace])] == rules


def test_an_event_from_before_the_optimizer_is_not_enough(story: Story) -> None:
    """The wait is there and waits for the wrong thing."""
    trace = story("""
        0: record 5
        0: optimizer
        1: wait 5
        1: all_gather of layers.0 6 -> 7
    """)
    assert _found(trace) == [("I9", "layers.0", 4)]


def test_a_gather_too_early_is_reported_once(story: Story) -> None:
    """All gathers after the first have the same fault."""
    trace = story("""
        0: optimizer
        1: all_gather of layers.0 6 -> 7
        1: all_gather of layers.1 8 -> 9
    """)
    assert _found(trace) == [("I9", "layers.0", 2)]


def test_a_gather_before_the_first_optimizer_step_has_nothing_to_wait_for(story: Story) -> None:
    """As every gather of the first step."""
    assert _found(story("1: all_gather of layers.0 6 -> 7\n0: optimizer")) == []


# -- I18: profiler ranges --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("push a\npush b\npop\npop\nstep end 0", []),
        ("push a\npop\npop", [("I18", None, 3)]),
        ("push a\nstep end 0\nstep begin 1", [("I18", None, 2)]),
        ("pop\npush a\npop\nstep end 0", [("I18", None, 1)]),
    ],
    ids=["balanced", "one pop too many", "one push too many", "a stray pop is one fault"],
)
def test_profiler_ranges_are_balanced(
    story: Story, text: str, found: list[tuple[str, str | None, int | None]]
) -> None:
    """An open range swallows all that follows in a profile."""
    assert _found(story(text)) == found


# -- I20: memory -----------------------------------------------------------------------------

COMBINED = {"overlap_moe_expert_parallel_comm": True, "prefetch": "none"}


@pytest.mark.parametrize(("num_units", "rules"), [(3, []), (4, ["I20"]), (5, ["I20"])])
def test_unsharded_units_are_bounded(story: Story, num_units: int, rules: list[str]) -> None:
    """One too many is reported, once a run."""
    gathers = "\n".join(f"1: unshard layers.{n}" for n in range(num_units))
    trace = story(gathers, scenario=COMBINED)
    assert [v.rule for v in check_units([trace])] == rules


def test_the_bound_is_for_the_combined_schedule(story: Story) -> None:
    """Elsewhere torch's or Megatron's own hooks decide."""
    gathers = "\n".join(f"1: unshard layers.{n}" for n in range(6))
    assert check_units([story(gathers)]) == []


@pytest.mark.parametrize(
    ("order", "rules"),
    [
        ("1: reduce layers.0\n1: reshard layers.0", ["I20"]),
        ("1: reshard layers.0\n1: reduce layers.0", []),
    ],
    ids=["reduced first", "released first"],
)
def test_weights_are_released_before_the_gradient_buffer_is_made(
    story: Story, order: str, rules: list[str]
) -> None:
    """Both at the same time are two full buffers of one unit."""
    trace = story(f"1: unshard layers.0\nhook post_gradient layers.0\n{order}")
    assert [v.rule for v in check_units([trace])] == rules


# -- reports ---------------------------------------------------------------------------------


def test_a_report_names_rank_unit_node_microbatch_and_hook(story: Story) -> None:
    """What a reader needs to find the place."""
    trace = story(
        """
        node mlp forward layers.2 1
        hook pre_forward layers.2
        1: unshard layers.2
        1: unshard layers.2
        """,
        rank=3,
    )
    [violation] = check_units([trace])
    assert str(violation).splitlines() == [
        "I2: Unit layers.2 is gathered while it is unsharded.",
        "  at rank 3, unit layers.2, node mlp forward of layers.2, microbatch 1, record 4",
        "  after hook: pre_forward of layers.2",
    ]


def test_the_hook_of_another_node_is_not_named(story: Story) -> None:
    """It ended with its node."""
    trace = story("""
        node mlp forward layers.2 1
        hook pre_forward layers.2
        end mlp forward
        1: reshard layers.2
    """)
    [violation] = check_units([trace])
    assert (violation.hook, violation.node, violation.microbatch) == (None, None, None)
