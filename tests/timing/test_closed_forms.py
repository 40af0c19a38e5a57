"""Times that can be worked out by hand, to the nanosecond."""

import pytest
from stories import Story, collective

from sim.timing.replay.engine import Times, run_program
from sim.timing.replay.program import CollectiveSpec, Program, ReplayError


def run(
    *stories: Story,
    collectives: list[CollectiveSpec] | None = None,
    compute_slowdown: float = 1.0,
    communication_slowdown: float = 1.0,
) -> Times:
    return run_program(
        Program(
            ranks=[story.program for story in stories],
            collectives=collectives or [],
            compute_slowdown=compute_slowdown,
            communication_slowdown=communication_slowdown,
        )
    )


def spans(times: Times, stream: int, rank: int = 0) -> list[tuple[int, int]]:
    found = times.ranks[rank].streams[stream]
    return list(zip(found.starts, found.ends, strict=True))


def test_two_kernels_of_one_stream_run_one_after_the_other() -> None:
    story = Story(launch=3)
    story.kernel(0, 100)
    story.kernel(0, 50)
    assert spans(run(story), 0) == [(3, 103), (103, 153)]


def test_a_short_kernel_leaves_the_device_to_the_host() -> None:
    story = Story(launch=10)
    for _ in range(4):
        story.kernel(0, 3)
    times = run(story)
    assert spans(times, 0) == [(10, 13), (20, 23), (30, 33), (40, 43)]
    assert times.ranks[0].end == 40


def test_long_kernels_hide_the_host() -> None:
    story = Story(launch=10)
    for _ in range(4):
        story.kernel(0, 100)
    times = run(story)
    assert times.end == 10 + 4 * 100
    assert times.ranks[0].end == 40


def test_a_wait_puts_one_stream_after_another() -> None:
    story = Story()
    story.kernel(0, 100)
    story.record(0, 1)
    story.wait(1, 1)
    story.kernel(1, 30)
    assert spans(run(story), 1)[-1] == (100, 130)


def test_a_wait_for_a_record_that_is_done_costs_nothing() -> None:
    story = Story()
    story.kernel(0, 10)
    story.record(0, 1)
    story.kernel(1, 100)
    story.wait(1, 1)
    story.kernel(1, 30)
    # The first 20 ns are shared by both streams.
    assert spans(run(story), 1) == [(0, 110), (110, 110), (110, 140)]


def test_two_streams_share_the_device_evenly() -> None:
    story = Story()
    story.kernel(0, 100)
    story.kernel(1, 40)
    times = run(story)
    assert spans(times, 1) == [(0, 80)]
    assert spans(times, 0) == [(0, 140)]


def test_three_streams_share_the_device_evenly() -> None:
    story = Story()
    story.kernel(0, 10)
    story.kernel(1, 20)
    story.kernel(2, 30)
    times = run(story)
    assert [spans(times, stream) for stream in range(3)] == [[(0, 30)], [(0, 50)], [(0, 60)]]


def test_a_collective_waits_for_the_slowest_rank() -> None:
    fast, slow = Story(0), Story(1)
    fast.kernel(0, 10)
    slow.kernel(0, 70)
    for story in (fast, slow):
        story.collective(0, 0)
        story.kernel(0, 5)
    times = run(fast, slow, collectives=[collective([0, 1], 100)])
    assert spans(times, 0, 0) == [(0, 10), (10, 170), (170, 175)]
    assert spans(times, 0, 1) == [(0, 70), (70, 170), (170, 175)]
    assert times.begins == [70]
    assert times.ends == [170]


def test_collectives_of_one_communicator_run_in_launch_order_across_streams() -> None:
    story = Story()
    story.kernel(0, 50)
    story.collective(0, 0)  # launched first, but its stream is busy
    story.collective(1, 1)
    times = run(story, collectives=[collective([0], 10), collective([0], 10)])
    assert spans(times, 1) == [(0, 70)]
    assert times.begins == [50, 60]


def test_collectives_of_two_communicators_do_not_wait_for_each_other() -> None:
    story = Story()
    story.kernel(0, 50)
    story.collective(0, 0)
    story.collective(1, 1)
    specs = [collective([0], 10), collective([0], 10, communicator="d")]
    assert run(story, collectives=specs).begins == [50, 0]


def test_collectives_on_the_same_links_share_them() -> None:
    story = Story()
    story.collective(0, 0)
    story.collective(1, 1, launch=40)
    specs = [collective([0], 100), collective([0], 100, communicator="d")]
    times = run(story, collectives=specs)
    # Alone for 40, together until the first has had its other 60, then alone again.
    assert times.ends == [40 + 120, 40 + 120 + 40]


def test_a_kernel_is_slower_while_a_collective_runs() -> None:
    story = Story()
    story.collective(1, 0)
    story.kernel(0, 100)
    times = run(story, collectives=[collective([0], 60)], compute_slowdown=1.25)
    # 60 ns do the work of 48, the other 52 follow undisturbed.
    assert spans(times, 0) == [(0, 112)]
    assert times.ends == [60]


def test_a_collective_is_slower_while_kernels_run() -> None:
    story = Story()
    story.collective(1, 0)
    story.kernel(0, 50)
    times = run(story, collectives=[collective([0], 100)], communication_slowdown=1.25)
    assert times.ends == [110]


def test_a_host_wait_holds_back_what_follows() -> None:
    story = Story(launch=5)
    story.kernel(0, 100)
    story.record(0, 1)
    story.sync(1)
    story.kernel(0, 10)
    times = run(story)
    assert spans(times, 0)[-1] == (110, 120)
    assert times.ranks[0].bases == [0, 105]


def test_a_rank_that_never_comes_is_named() -> None:
    here, away = Story(0), Story(1)
    here.collective(0, 0)
    away.kernel(0, 1)
    with pytest.raises(ReplayError, match=r"Rank 0, stream 0: waits for the all_gather"):
        run(here, away, collectives=[collective([0, 1], 10)])


def test_a_host_that_waits_for_ever_is_named() -> None:
    story = Story()
    story.sync(7)
    with pytest.raises(ReplayError, match="Rank 0: its host waits"):
        run(story)
