"""Storage in order: each rule has a story that breaks it and a twin that keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace, TraceError
from sim.checks import Access
from sim.checks.storage import check_storage

Story = Callable[..., Trace]


def _rules(trace: Trace) -> list[str]:
    return [violation.rule for violation in check_storage([trace])]


# -- I1: what is read is there ---------------------------------------------------------------


@pytest.mark.parametrize(("join", "rules"), [("", ["I1"]), ("0: wait 5", [])])
def test_a_read_waits_for_the_gather(story: Story, join: str, rules: list[str]) -> None:
    """The gather runs on its own stream; the reader must have joined it."""
    trace = story(f"""
        1: all_gather of layers.0 6 -> 7
        1: record 5
        {join}
        0: mm 7 8 -> 9
    """)
    assert _rules(trace) == rules


def test_a_join_that_comes_after_the_read_is_too_late(story: Story) -> None:
    """It is the usual way in which the wait is lost: it moved down."""
    trace = story("""
        1: all_gather of layers.0 6 -> 7
        1: record 5
        0: mm 7 8 -> 9
        0: wait 5
    """)
    assert _rules(trace) == ["I1"]


def test_every_reading_stream_waits_for_itself(story: Story) -> None:
    """That the compute stream has joined the gather does not help the communication stream."""
    trace = story("""
        1: all_gather of layers.0 6 -> 7
        0: wait stream 1
        0: mm 7 8 -> 9
        2: mm 7 10 -> 11
    """)
    [violation] = check_storage([trace])
    assert violation.rule == "I1"
    assert violation.second == Access(4, 2, "mm reads", "stream 2")


def test_a_read_after_the_release_is_found(story: Story) -> None:
    """The memory is gone although all is in order."""
    trace = story("""
        0: all_gather -> 7
        0: mm 7 -> 9
        0: resize 7 64 0
        0: mm 7 -> 10
    """)
    assert _rules(trace) == ["I1"]


def test_a_write_after_the_release_is_found(story: Story) -> None:
    """A gather into memory that was not brought back."""
    assert _rules(story("0: resize 7 64 0\n0: all_gather -> 7")) == ["I1"]


def test_a_read_after_release_and_new_gather_is_fine(story: Story) -> None:
    """The life of a weight: release, bring back, write, read."""
    trace = story("""
        name 7 layers.0:weights
        0: resize 7 64 0
        0: resize 7 0 64
        0: all_gather of layers.0 6 -> 7
        0: mm 7 -> 9
    """)
    assert _rules(trace) == []


def test_a_weight_brought_back_is_written_before_it_is_read(story: Story) -> None:
    """Its memory is there, and what is in it is anything."""
    trace = story("""
        name 7 layers.0:weights
        0: resize 7 64 0
        0: resize 7 0 64
        0: mm 7 -> 9
    """)
    [violation] = check_storage([trace])
    assert violation.rule == "I1"
    assert violation.message == (
        "The weights of unit layers.0 is read before anything was written to it."
    )


def test_storage_without_a_name_may_be_read_unwritten(story: Story) -> None:
    """What fills it may be no kernel; only the weights are known to be gathered."""
    assert _rules(story("0: allocate 7 64\n0: mm 7 -> 9")) == []


def test_readers_need_no_order_among_themselves(story: Story) -> None:
    """Two streams may read the same weights at the same time."""
    trace = story("""
        0: all_gather -> 7
        1: wait stream 0
        0: mm 7 -> 9
        1: mm 7 -> 10
    """)
    assert _rules(trace) == []


# -- I4: released and written after the last use ---------------------------------------------


@pytest.mark.parametrize(("join", "rules"), [("", ["I4"]), ("1: wait 5", [])])
def test_a_release_waits_for_the_last_reader(story: Story, join: str, rules: list[str]) -> None:
    """The release is on the gather's stream, the reader is not."""
    trace = story(f"""
        1: all_gather -> 7
        0: wait stream 1
        0: mm 7 -> 9
        0: record 5
        {join}
        1: resize 7 64 0
    """)
    assert _rules(trace) == rules


def test_a_release_waits_for_the_readers_of_every_stream(story: Story) -> None:
    """The newest reader is joined and the other one is not."""
    trace = story("""
        1: all_gather -> 7
        0: wait stream 1
        2: wait stream 1
        2: mm 7 -> 10
        0: mm 7 -> 9
        1: wait stream 0
        1: resize 7 64 0
    """)
    [violation] = check_storage([trace])
    assert violation.rule == "I4"
    assert violation.first == Access(4, 2, "mm reads", "stream 2")


def test_a_release_waits_for_the_last_and_not_the_first_read(story: Story) -> None:
    """An event from between two reads covers the first only."""
    trace = story("""
        0: all_gather -> 7
        0: mm 7 -> 9
        0: record 5
        0: mm 7 -> 10
        1: wait 5
        1: resize 7 64 0
    """)
    assert _rules(trace) == ["I4"]


def test_record_stream_holds_a_release_back(story: Story) -> None:
    """The allocator waits in place of the code."""
    trace = story("""
        0: mm 7 -> 9
        0: record_stream 7
        1: resize 7 64 0
    """)
    assert _rules(trace) == []


@pytest.mark.parametrize(("join", "rules"), [("", ["I4"]), ("1: wait stream 0", [])])
def test_two_writers_have_an_order(story: Story, join: str, rules: list[str]) -> None:
    """Two microbatches that add to one gradient."""
    trace = story(f"""
        0: add_ -> 7
        {join}
        1: add_ -> 7
    """)
    assert _rules(trace) == rules


@pytest.mark.parametrize(("join", "rules"), [("", ["I4"]), ("1: wait stream 0", [])])
def test_a_writer_waits_for_the_readers(story: Story, join: str, rules: list[str]) -> None:
    """A gather into a buffer that the compute stream still reads."""
    trace = story(f"""
        0: mm 7 -> 9
        {join}
        1: all_gather -> 7
    """)
    assert _rules(trace) == rules


# -- I10: memory that is given out again -----------------------------------------------------

REUSED = """
    1: allocate 7 64
    1: all_gather -> 7
    0: wait stream 1
    0: mm 7 -> 9
"""


def test_a_block_is_not_given_out_while_another_stream_uses_it(story: Story) -> None:
    """The allocator knows the allocating stream only."""
    trace = story(f"{REUSED}\nfree 7\n1: allocate 8 64")
    [violation] = check_storage([trace])
    assert violation.rule == "I10"
    assert (violation.first, violation.second) == (
        Access(4, 0, "mm reads", "stream 0"),
        Access(6, 1, "allocation", "stream 1"),
    )
    assert violation.message == (
        "Storage 7 went back to the pool of stream 1 in record 5 and may be given out again while "
        "stream 0 uses it."
    )
    assert violation.missing == (
        "stream 1 never waits for mm on stream 0 in record 4, and record_stream was not called"
    )


@pytest.mark.parametrize(
    "end",
    [
        "0: record_stream 7\nfree 7\n1: allocate 8 64",
        "1: wait stream 0\nfree 7\n1: allocate 8 64",
        "free 7\n1: wait stream 0\n1: allocate 8 64",
        "free 7\nhost waits device\n1: allocate 8 64",
        "free 7\n1: allocate 8 65",
        "free 7\n0: allocate 8 64",
        "free 7",
        "1: allocate 8 64",
    ],
    ids=[
        "record_stream",
        "joined before the free",
        "joined before the reuse",
        "host wait before the reuse",
        "too large for the block",
        "another stream's pool",
        "never reused",
        "never freed",
    ],
)
def test_a_block_is_safe_when_it_cannot_be_in_use(story: Story, end: str) -> None:
    """Each of these keeps the bad story's reuse away."""
    assert _rules(story(f"{REUSED}\n{end}")) == []


def test_a_large_block_is_given_out_in_part(story: Story) -> None:
    """The allocator splits blocks."""
    assert _rules(story(f"{REUSED}\nfree 7\n1: allocate 8 16")) == ["I10"]


def test_a_block_passed_over_is_still_dangerous(story: Story) -> None:
    """Too small for one allocation, it is taken by the next."""
    trace = story(f"{REUSED}\nfree 7\n1: allocate 8 65\n1: allocate 9 64")
    assert _rules(trace) == ["I10"]


def test_record_stream_protects_the_stream_it_names(story: Story) -> None:
    """Another stream's use is not covered by it."""
    assert _rules(story(f"{REUSED}\n2: record_stream 7\nfree 7\n1: allocate 8 64")) == ["I10"]


def test_a_block_of_unknown_origin_gives_no_alarm(story: Story) -> None:
    """Without its allocation nobody knows whose pool it goes to."""
    trace = story("""
        1: all_gather -> 7
        0: wait stream 1
        0: mm 7 -> 9
        free 7
        1: allocate 8 64
    """)
    assert _rules(trace) == []


def test_a_storage_brought_back_takes_a_block_like_an_allocation(story: Story) -> None:
    """Weights get their memory by a resize."""
    assert _rules(story(f"{REUSED}\nfree 7\n1: resize 8 0 64")) == ["I10"]


@pytest.mark.parametrize(("join", "rules"), [("", ["I10"]), ("1: wait stream 0", [])])
def test_a_release_on_another_stream_does_not_make_its_block_safe(
    story: Story, join: str, rules: list[str]
) -> None:
    """The block goes to the pool of the stream that allocated it, wherever it is released."""
    trace = story(f"""
        {REUSED}
        2: wait stream 0
        2: resize 7 64 0
        {join}
        1: allocate 8 64
    """)
    assert _rules(trace) == rules


# -- reports ---------------------------------------------------------------------------------


def test_a_storage_is_reported_once_a_microbatch(story: Story) -> None:
    """The reads that follow are the same fault; the next microbatch is another one."""
    trace = story("""
        1: all_gather -> 7
        node mlp forward layers.0 0
        0: mm 7 -> 9
        0: mm 7 -> 9
        end mlp forward
        node mlp forward layers.0 1
        0: mm 7 -> 9
        end mlp forward
    """)
    assert [(v.rule, v.microbatch, v.seq) for v in check_storage([trace])] == [
        ("I1", 0, 3),
        ("I1", 1, 7),
    ]


def test_two_storages_are_two_reports(story: Story) -> None:
    """Even within one kernel."""
    assert _rules(story("1: all_gather -> 7 8\n0: mm 7 8 -> 9")) == ["I1", "I1"]


def test_a_report_names_all_that_is_needed_to_find_the_place(story: Story) -> None:
    """Rank, unit, node, microbatch, both accesses with their streams, the edge and the hooks."""
    trace = story(
        """
        role 0 compute
        role 1 all-gather
        name 7 layers.2:full weight
        node attn forward layers.2 0
        hook pre_forward layers.2
        1: all_gather of layers.2 6 -> 7
        end attn forward
        node mlp backward layers.2 1
        hook pre_backward layers.2
        0: mm 7 8 -> 9
        """,
        rank=3,
    )
    [violation] = check_storage([trace])
    assert str(violation).splitlines() == [
        "I1: The full weight of unit layers.2 is used by two streams in no order.",
        "  at rank 3, unit layers.2, node mlp backward of layers.2, microbatch 1, record 10",
        (
            "  first:  all_gather of layers.2 writes (record 6, stream 1 (all-gather), "
            "attn forward of layers.2, microbatch 0, after pre_forward of layers.2)"
        ),
        (
            "  second: mm reads (record 10, stream 0 (compute), "
            "mlp backward of layers.2, microbatch 1, after pre_backward of layers.2)"
        ),
        (
            "  missing: stream 0 (compute) never waits for all_gather of layers.2 on "
            "stream 1 (all-gather) in record 6"
        ),
        "  after hook: pre_backward of layers.2",
    ]


def test_the_root_unit_has_a_name_in_reports(story: Story) -> None:
    """An empty name would read as none."""
    [violation] = check_storage([story("name 7 :weights\n1: all_gather -> 7\n0: mm 7 -> 9")])
    assert violation.unit == "<root>"
    assert violation.message.startswith("The weights of unit <root> ")


def test_ranks_are_judged_apart(story: Story) -> None:
    """Storage 7 of one rank is not storage 7 of the other."""
    good = story("0: all_gather -> 7\n0: mm 7 -> 9")
    bad = story("1: all_gather -> 7\n0: mm 7 -> 9", rank=1)
    assert [(v.rule, v.rank) for v in check_storage([good, bad])] == [("I1", 1)]


# -- asynchronous collectives ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("join", "rules"),
    [
        ("", ["I1"]),
        ("0: joins dp 0", []),
        ("0: wait stream 1", ["I1"]),
        ("1: joins dp 0", ["I1"]),
        ("1: joins dp 0\n0: wait stream 1", []),
        ("host waits device", []),
    ],
    ids=["no wait", "wait", "wait for the issuer", "wait elsewhere", "by way of it", "host"],
)
def test_an_asynchronous_result_is_ready_for_who_waited(
    story: Story, join: str, rules: list[str]
) -> None:
    """The issuing stream is not the one that it runs on."""
    trace = story(f"1: async all_gather of layers.0 6 -> 7\n{join}\n0: mm 7 -> 9")
    assert _rules(trace) == rules


def test_an_asynchronous_collective_starts_after_what_its_issuer_had(story: Story) -> None:
    """The communicator's stream waits for the issuing one."""
    assert _rules(story("1: cast 5 -> 6\n1: async all_gather 6 -> 7")) == []
    assert _rules(story("0: cast 5 -> 6\n1: async all_gather 6 -> 7")) == ["I1"]


def test_the_next_synchronous_collective_does_not_stand_for_the_wait(story: Story) -> None:
    """It runs on its own stream, which knows nothing of the communicator's."""
    trace = story("0: async all_gather 6 -> 7\n0: all_gather 8 -> 9\n0: mm 7 -> 10")
    assert _rules(trace) == ["I1"]


def test_one_communicator_runs_its_asynchronous_collectives_in_order(story: Story) -> None:
    """To have waited for the second is to have waited for the first."""
    trace = story("""
        1: async all_gather 6 -> 7
        1: async all_gather 8 -> 9
        0: joins dp 1
        0: mm 7 9 -> 10
    """)
    assert _rules(trace) == []


def test_two_communicators_run_side_by_side(story: Story) -> None:
    """The wait is for one of them."""
    trace = story("""
        1: async all_gather 6 -> 7
        1: async all_gather in ep 8 -> 9
        0: joins ep 0
        0: mm 7 -> 10
    """)
    assert _rules(trace) == ["I1"]


def test_a_gradient_read_before_its_asynchronous_reduction_is_the_fence_s_fault(
    story: Story,
) -> None:
    """A weight is I1, a gradient is I8."""
    trace = story("""
        name 7 layers.0:main gradient
        1: async reduce_scatter of layers.0 6 -> 7
        0: norm 7 -> 9
    """)
    [violation] = check_storage([trace])
    assert (violation.rule, violation.unit) == ("I8", "layers.0")
    assert violation.missing == (
        "stream 0 never waits for the work of reduce_scatter of layers.0, issued in record 2"
    )


@pytest.mark.parametrize(("join", "rules"), [("", ["I9"]), ("1: wait stream 0", [])])
def test_a_shard_gathered_while_the_optimizer_writes_it_is_i9(
    story: Story, join: str, rules: list[str]
) -> None:
    """The same race on full weights is I1."""
    written = "name 6 layers.0:model weight\n0: copy_ 5 -> 6"
    assert _rules(story(f"{written}\n{join}\n1: all_gather of layers.0 6 -> 7")) == rules


def test_the_input_of_an_asynchronous_collective_is_not_written_before_the_wait(
    story: Story,
) -> None:
    """The next microbatch may not pack its gradients over it."""
    assert _rules(story("0: async all_gather 6 -> 7\n0: copy_ 5 -> 6")) == ["I4"]
    assert _rules(story("0: async all_gather 6 -> 7\n0: joins dp 0\n0: copy_ 5 -> 6")) == []


@pytest.mark.parametrize(
    ("rest", "rules"),
    [
        ("free 6\n0: allocate 8 64", []),
        ("free 6\n0: joins dp 0\n0: allocate 8 64", []),
        ("free 6\n2: joins dp 0\n0: allocate 8 64", ["I10"]),
        ("0: resize 6 64 0", ["I4"]),
    ],
    ids=["held", "given back at the wait", "waited for elsewhere", "a resize asks nobody"],
)
def test_the_work_holds_its_tensors_until_the_wait(
    story: Story, rest: str, rules: list[str]
) -> None:
    """Memory that is freed before comes back at the wait."""
    trace = story(f"0: allocate 6 64\n0: copy_ 5 -> 6\n0: async all_gather 6 -> 7\n{rest}")
    assert _rules(trace) == rules


def test_a_message_is_ready_for_who_waited(story: Story) -> None:
    """Numbers of messages count their pair and direction; another one's wait is no help."""
    received = "0: recv from 1 in pp -> 7\n0: send to 1 in pp 8"
    assert _rules(story(f"{received}\n0: joins pp 0 recv from 1\n0: mm 7 -> 9")) == []
    assert _rules(story(f"0: send to 2 in pp 8\n{received}\n0: mm 7 -> 9")) == ["I1"]


def test_a_wait_for_what_was_never_issued_is_no_trace(story: Story) -> None:
    """It says which record is wrong instead of guessing."""
    with pytest.raises(TraceError, match=r"record 1 to wait for a collective .* number 3 of group"):
        check_storage([story("0: joins dp 3")])
