"""Around the optimizer: who has to wait for whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.fences import check_fences

Story = Callable[..., Trace]


def _found(trace: Trace) -> list[tuple[str, str | None, int | None]]:
    return [(v.rule, v.unit, v.seq) for v in check_fences([trace])]


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
    assert [v.rule for v in check_fences([trace])] == rules


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
    assert [v.rule for v in check_fences([trace])] == rules


def test_an_event_from_before_the_optimizer_is_not_enough(story: Story) -> None:
    """The wait is there and waits for the wrong thing."""
    trace = story("""
        0: record 5
        0: optimizer
        1: wait 5
        1: all_gather of layers.0 6 -> 7
    """)
    assert _found(trace) == [("I9", "layers.0", 4)]


def test_the_host_may_look_at_values_inside_the_optimizer(story: Story) -> None:
    """Its record is where it begins; weights are written until the end of the step."""
    text = "0: optimizer\n{inside}\nstep end 0\n{after}\n1: all_gather of layers.0 6 -> 7"
    sync = "host waits stream 0"
    assert _found(story(text.format(inside=sync, after=""))) == [("I9", "layers.0", 4)]
    assert _found(story(text.format(inside="", after=sync))) == []


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


# -- an optimizer on a side stream -------------------------------------------------------------

ON_A_SIDE_STREAM = """
    role 0 compute
    name 6 layers.0:model weight
    step begin 0
    5: wait stream 0
    {begin}: optimizer
    {kernel}
    5: record 1
    {join}
    step end 0
    step begin 1
    1: wait stream 0
    1: all_gather of layers.0 6 -> 7
"""


@pytest.mark.parametrize("kernel", ["5: adam 8 -> 6", ""], ids=["kernels", "no kernels"])
@pytest.mark.parametrize(
    ("join", "rules"),
    [("0: wait 1", []), ("0: wait stream 5", []), ("", ["I9"]), ("3: wait 1", ["I9"])],
    ids=["event", "stream", "not joined", "joined by another"],
)
def test_an_optimizer_on_a_side_stream_is_joined_before_the_step_ends(
    story: Story, kernel: str, join: str, rules: list[str]
) -> None:
    """It may step where it likes, as long as gathers come after it."""
    trace = story(ON_A_SIDE_STREAM.format(begin=5, kernel=kernel, join=join))
    assert [v.rule for v in check_fences([trace])] == rules


@pytest.mark.parametrize(("join", "rules"), [("0: wait 1", []), ("", ["I9"])])
def test_an_optimizer_that_forks_a_side_stream_is_dated_by_its_kernels(
    story: Story, join: str, rules: list[str]
) -> None:
    """It begins on one stream and writes on another."""
    trace = story(ON_A_SIDE_STREAM.format(begin=0, kernel="5: adam 8 -> 6", join=join))
    found = check_fences([trace])
    assert [v.rule for v in found] == rules
    assert [str(v.first) for v in found] == ["optimizer writes (record 6, stream 5)"] * len(found)


def test_an_event_from_between_two_writes_of_the_optimizer_is_not_enough(story: Story) -> None:
    """The second one is still to come."""
    join = "0: wait 1\n5: adam 8 -> 6"
    trace = story(ON_A_SIDE_STREAM.format(begin=5, kernel="5: adam 8 -> 6", join=join))
    assert [v.rule for v in check_fences([trace])] == ["I9"]


def test_weights_are_known_by_their_gathers_too(story: Story) -> None:
    """A tree need not name its buffers."""
    text = ON_A_SIDE_STREAM.format(begin=0, kernel="5: adam 8 -> 6", join="")
    unnamed = "\n".join(line for line in text.splitlines() if "name" not in line)
    assert [v.rule for v in check_fences([story(unnamed)])] == ["I9"]


# -- an optimizer that refreshes weights where they are gathered ---------------------------------

REFRESH = """
    0: optimizer
    {fork}
    {join}
    step end 0
    step begin 1
    1: all_gather of layers.0 6 -> 7
"""


@pytest.mark.parametrize(
    ("fork", "join", "rules"),
    [
        ("1: wait stream 0", "0: wait stream 1", []),
        ("1: wait stream 0", "", ["I9"]),
        ("", "0: wait stream 1", ["I9"]),
        ("4: wait stream 0", "0: wait stream 4", ["I9"]),
    ],
    ids=["forked and joined", "not joined", "not forked", "on another stream"],
)
def test_weights_refreshed_on_the_stream_of_gathers_are_there_for_them(
    story: Story, fork: str, join: str, rules: list[str]
) -> None:
    """Without kernels: what the optimizer step forks to that stream is its refresh."""
    trace = story(REFRESH.format(fork=fork, join=join))
    assert [v.rule for v in check_fences([trace])] == rules
