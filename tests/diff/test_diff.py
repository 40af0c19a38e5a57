"""Comparing runs: equal ones are equal, and each kind of change shows where it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from real.trace import Trace
from real.trace.record import validate_record
from sim.diff import ALLOWANCES, canonical, canonical_text, compare, side_by_side
from sim.diff.canonical import stream_roles


def trace_of(*records: dict[str, Any], scenario: dict[str, Any] | None = None) -> Trace:
    """Returns a trace of one rank; each record gets its number."""
    numbered = [{"seq": seq, **record} for seq, record in enumerate(records, start=1)]
    for record in numbered:
        validate_record(record)
    return Trace(rank=0, world_size=1, scenario=scenario or {}, records=numbered, is_complete=True)


def small_run(compute: int = 0, gather: int = 1, event: int = 0, storage: int = 0) -> Trace:
    """A step in which a unit is gathered on demand; the arguments are numbers, with no meaning."""
    return trace_of(
        {"op": "stream", "stream": compute, "priority": 0},
        {"op": "stream", "stream": gather, "priority": 0},
        {"op": "group", "group": str(event), "ranks": [0, 1]},
        {"op": "step", "step": 0, "event": "begin"},
        {"op": "hook", "point": "pre_forward", "module": "layers.0.fc", "unit": "layers.0"},
        {"op": "nvtx_push", "text": "MFSDP layers.0 unshard"},
        {"op": "resize", "stream": gather, "storage": storage, "bytes": 64, "was": 0},
        {
            "op": "collective",
            "stream": gather,
            "group": str(event),
            "n": 0,
            "kind": "all_gather",
            "bytes": 32,
            "dtype": "bfloat16",
            "async": False,
            "unit": "layers.0",
            "reads": [storage + 1],
            "writes": [storage],
        },
        {"op": "event_record", "stream": gather, "event": event},
        {"op": "nvtx_pop"},
        {"op": "unshard", "unit": "layers.0", "stream": compute, "gathered": True},
        {"op": "event_wait", "stream": compute, "event": event, "record": 9},
        {
            "op": "collective",
            "stream": compute,
            "group": str(event),
            "n": 1,
            "kind": "all_to_all_single",
            "bytes": 100 + storage,
            "dtype": "bfloat16",
            "async": False,
            "unit": None,
            "reads": [],
            "writes": [],
        },
        {"op": "resize", "stream": compute, "storage": 7, "bytes": 0, "was": 10 + storage},
        {"op": "fence", "stream": compute},
        {"op": "step", "step": 0, "event": "end"},
        {"op": "end", "records": 17},
    )


def first_texts(first: Trace, second: Trace) -> tuple[str | None, str | None]:
    """Returns the first pair of lines that differ."""
    (difference,) = compare([first], [second], is_canonical=True).differences
    for one, other in difference.rows:
        if one is None or other is None or one.text != other.text:
            return one and one.text, other and other.text
    raise AssertionError("no row differs")


def changed(number: int, **fields: object) -> Trace:
    """Returns the small run with some fields of one record changed."""
    trace = small_run()
    records = copy.deepcopy(trace.records)
    records[number - 1].update(fields)
    return Trace(rank=0, world_size=1, scenario={}, records=records, is_complete=True)


def without(number: int) -> Trace:
    """Returns the small run without one record."""
    trace = small_run()
    records = trace.records[: number - 1] + trace.records[number:]
    return Trace(rank=0, world_size=1, scenario={}, records=records, is_complete=True)


def test_numbers_of_streams_events_groups_and_storages_have_no_meaning() -> None:
    """A GPU numbers them by first use."""
    result = compare([small_run()], [small_run(5, 3, 9, 40)], is_canonical=True)
    assert result.is_equal
    assert {allowance.name: count for allowance, count in result.allowed.items()} == {
        "bytes of an all_to_all": "1 differ",
        "bytes of an activation's storage": "1 differ",
        "records that give numbers (stream, group)": "3 and 3 records left out",
    }


def test_an_equal_run_needs_no_allowance_for_sizes() -> None:
    """What is allowed is reported only where it was needed."""
    result = compare([small_run()], [small_run()], is_canonical=True)
    assert [allowance.name for allowance in result.allowed] == [
        "records that give numbers (stream, group)"
    ]


@pytest.mark.parametrize(
    ("number", "fields", "expected"),
    [
        (5, {"module": "layers.0.other"}, "hook pre_forward layers.0.other of layers.0"),
        (5, {"unit": "layers.1"}, "hook pre_forward layers.0.fc of layers.1"),
        (6, {"text": "MFSDP layers.0 reshard"}, "push MFSDP layers.0 reshard"),
        (7, {"bytes": 128}, "bring back storage @all_gather 0 to 128 B"),
        (8, {"bytes": 33}, "all_gather of layers.0 bfloat16 in 0,1/1 #1 @all_gather 33 B"),
        (8, {"dtype": "float32"}, "all_gather of layers.0 float32 in 0,1/1 #1 @all_gather 32 B"),
        (8, {"async": True}, "all_gather of layers.0 bfloat16 async in 0,1/1 #1 @all_gather 32 B"),
        (9, {"stream": 0}, "record @compute"),
        (11, {"gathered": False}, "unshard has layers.0 @compute"),
        (12, {"record": None}, "@compute waits for nothing"),
        (12, {"stream": 1}, "@all_gather waits for record 1 @all_gather after MFSDP layers.0 "),
        (13, {"kind": "all_to_all"}, "all_to_all bfloat16 in 0,1/1 #2 @compute"),
        (13, {"stream": 1}, "all_to_all_single bfloat16 in 0,1/1 #2 @all_gather"),
        (14, {"bytes": 10}, "bring back storage @compute"),
    ],
)
def test_what_must_be_equal_shows_when_it_is_not(
    number: int, fields: dict[str, object], expected: str
) -> None:
    """One field of one record at a time."""
    _, other = first_texts(small_run(), changed(number, **fields))
    assert other is not None
    assert other.startswith(expected)


@pytest.mark.parametrize("number", range(5, 17))
def test_a_record_that_is_missing_shows(number: int) -> None:
    """Each one of a step."""
    assert not compare([small_run()], [without(number)], is_canonical=True).is_equal


def test_a_wait_for_the_wrong_record_shows() -> None:
    """Both are records of the same stream, between the same two hooks."""
    two = [*small_run().records[:9], {"op": "event_record", "stream": 1, "event": 3}]
    waits = [
        trace_of(
            *({k: v for k, v in r.items() if k != "seq"} for r in two),
            {"op": "event_wait", "stream": 0, "event": 0, "record": record},
            {"op": "fence", "stream": 0},
        )
        for record in (9, 10)
    ]
    assert first_texts(*waits) == (
        "@compute waits for record 1 @all_gather after MFSDP layers.0 unshard/1",
        "@compute waits for record 2 @all_gather after MFSDP layers.0 unshard/1",
    )


def test_ranges_of_libraries_are_left_out_with_their_ends_and_counted() -> None:
    """A range of a unit inside one is not."""
    plain = small_run()
    records = [{k: v for k, v in r.items() if k != "seq"} for r in plain.records]
    wrapped = [*records[:4], {"op": "nvtx_push", "text": "aten::mm"}, *records[4:]]
    wrapped.insert(11, {"op": "nvtx_pop"})
    for record in wrapped:
        if record["op"] == "event_wait":
            record["record"] = 10
    result = compare([plain], [trace_of(*wrapped)], is_canonical=True)
    assert result.is_equal
    assert {a.name: c for a, c in result.allowed.items()}[
        "profiler ranges that are not MFSDP's"
    ] == "0 and 2 records left out"


def test_kernels_are_left_out_with_the_host_wait_for_a_value() -> None:
    """Other host waits stay: code asked for them."""
    records = [{k: v for k, v in r.items() if k != "seq"} for r in small_run().records]
    wait = {"op": "host_sync", "what": "stream", "on": 0}
    kernel = {"op": "kernel", "stream": 0, "reads": [3], "writes": []}
    with_value = trace_of(
        *records[:14], wait, {**kernel, "name": "_local_scalar_dense"}, *records[14:]
    )
    assert compare([small_run()], [with_value], is_canonical=True).is_equal
    asked_for = trace_of(*records[:14], wait, {**kernel, "name": "mm"}, *records[14:])
    assert first_texts(small_run(), asked_for) == (None, "host waits for stream @compute")


def test_a_gather_on_the_compute_stream_reads_as_that() -> None:
    """A role is given once: a stream that computes is the compute stream whatever else it does."""
    assert stream_roles(changed(8, stream=0).records)[0] == "compute"
    assert "in 0,1/1 #1 @compute 32 B" in canonical_text(changed(8, stream=0))


def test_different_scenarios_are_different_runs() -> None:
    """Equal records of unequal scenarios prove nothing."""
    runs = [[trace_of({"op": "end", "records": 1}, scenario={"seed": s})] for s in (1, 2)]
    result = compare(*runs, is_canonical=True)
    assert result.scenario == {"seed": (1, 2)}
    assert not result.is_equal


def test_an_exact_comparison_takes_numbers_at_their_word() -> None:
    """The same run under other numbers is another file."""
    assert compare([small_run()], [small_run()], is_canonical=False).is_equal
    result = compare([small_run()], [small_run(event=4)], is_canonical=False)
    assert result.differences[0].rows[-1][1] is not None
    assert not result.is_equal
    assert result.allowed == {}


def test_runs_of_different_size_are_refused() -> None:
    """There is nobody to compare a rank with."""
    with pytest.raises(ValueError, match="equally many ranks, got 1 and 2"):
        compare([small_run()], [small_run(), small_run()], is_canonical=True)


def test_both_sides_stand_beside_each_other_with_what_came_before() -> None:
    """The numbers are those of the records in each file."""
    (difference,) = compare([small_run()], [without(9)], is_canonical=True).differences
    lines = side_by_side(difference, width=40)
    assert any(line.startswith("  ") and "bring back storage" in line for line in lines)
    (marked,) = [line for line in lines if line.startswith(">") and "record @all_gather" in line]
    assert marked.split() == [">", "9", "record", "@all_gather", "|", "-"]


def test_a_record_kind_without_a_form_of_its_own_keeps_its_fields() -> None:
    """New kinds are compared from the day they are recorded."""
    line = canonical(trace_of({"op": "grad_read", "stream": 0, "by": "clip"})).lines[0]
    assert line.text == "grad_read by clip @compute"
    text = canonical_text(trace_of({"op": "end", "records": 3}))
    assert text == "end\n"


def test_every_allowance_says_why() -> None:
    """A list without reasons grows."""
    assert len({allowance.name for allowance in ALLOWANCES}) == len(ALLOWANCES)
    assert all(allowance.reason.endswith(".") for allowance in ALLOWANCES)
