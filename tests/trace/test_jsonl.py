"""Traces on disk: what is written is read back, and what is broken is named by file and line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from real.trace import (
    SCHEMA_VERSION,
    JsonlSink,
    OpKind,
    Recorder,
    Trace,
    TraceError,
    read_trace,
    read_traces,
    trace_path,
    why_not_whole,
)

SCENARIO = {"num_layers": 2, "transformer_impl": "local", "lr": 0.001, "prefetch": "none"}
RECORDS = [
    {"seq": 1, "op": "step", "step": 0, "event": "begin"},
    {"seq": 2, "op": "unshard", "unit": "decoder.layers.0", "stream": 3, "gathered": True},
    {"seq": 3, "op": "collective_wait", "stream": 3, "group": "dp", "n": 0},
    {"seq": 4, "op": "end", "records": 4},
]


def write_rank(folder: Path, rank: int = 0, world_size: int = 1) -> Path:
    """Writes a complete small trace of one rank."""
    path = trace_path(folder, rank)
    recorder = Recorder(JsonlSink(path))
    recorder.header(rank=rank, world_size=world_size, scenario=SCENARIO)
    recorder.begin_step(0)
    recorder.record(OpKind.UNSHARD, unit="decoder.layers.0", stream=3, gathered=True)
    recorder.record(OpKind.COLLECTIVE_WAIT, stream=3, group="dp", n=0)
    recorder.close()
    return path


def change_line(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes one record of a file, by line number from 1."""
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[number - 1])
    change(record)
    lines[number - 1] = json.dumps(record) + "\n"
    path.write_text("".join(lines))


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Readers get what the run had, the header apart."""
    assert read_trace(write_rank(tmp_path)) == Trace(
        rank=0, world_size=1, scenario=SCENARIO, records=RECORDS, is_complete=True
    )


def test_two_equal_runs_write_the_same_bytes(tmp_path: Path) -> None:
    """Traces are compared as files."""
    (tmp_path / "again").mkdir()
    assert write_rank(tmp_path).read_bytes() == write_rank(tmp_path / "again").read_bytes()


def test_all_ranks_are_read_in_rank_order(tmp_path: Path) -> None:
    """Rank 10 comes after rank 9, and other files are left alone."""
    for rank in reversed(range(11)):
        write_rank(tmp_path, rank, 11)
    (tmp_path / "rank-of-nothing.jsonl").write_text("not a trace")
    assert [trace.rank for trace in read_traces(tmp_path)] == list(range(11))


# -- runs that were cut short ---------------------------------------------------------------


def test_a_truncated_last_line_makes_the_trace_incomplete(tmp_path: Path) -> None:
    """A kill in the middle of a write costs that line and no more."""
    path = write_rank(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    trace = read_trace(path)
    assert (trace.records, trace.is_complete) == (RECORDS[:-1], False)


def test_a_trace_without_its_end_is_incomplete(tmp_path: Path) -> None:
    """The kill may also fall between two lines."""
    path = write_rank(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    trace = read_trace(path)
    assert (trace.records, trace.is_complete) == (RECORDS[:-1], False)


def run_and_kill(folder: Path, num_records: int) -> Trace:
    """Writes records in a process that ends without closing anything, and reads them."""
    path = trace_path(folder, 0)
    program = f"""
import os
from pathlib import Path
from real.trace import JsonlSink, OpKind, Recorder

recorder = Recorder(JsonlSink(Path({str(path)!r})))
recorder.header(rank=0, world_size=1, scenario={{}})
for n in range({num_records}):
    recorder.record(OpKind.COLLECTIVE_WAIT, stream=3, group="dp", n=n)
os._exit(1)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    return read_trace(path)


def test_a_killed_process_leaves_all_but_the_last_few_records(tmp_path: Path) -> None:
    """What went wrong is near the end, so the end must be there."""
    trace = run_and_kill(tmp_path, 1000)
    assert not trace.is_complete
    assert [record["n"] for record in trace.records] == list(range(len(trace.records)))
    assert len(trace.records) >= 1000 - 256


def test_a_process_killed_at_once_leaves_its_header(tmp_path: Path) -> None:
    """A rank that dies first must not make the whole trace unreadable."""
    trace = run_and_kill(tmp_path, 1)
    assert (trace.rank, trace.world_size, trace.is_complete) == (0, 1, False)


# -- broken files ---------------------------------------------------------------------------


def message_of(path: Path) -> str:
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    return str(raised.value)


def test_a_corrupted_line_is_named(tmp_path: Path) -> None:
    """Only the last line may be cut."""
    path = write_rank(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:20] + "\n"
    path.write_text("".join(lines))
    assert message_of(path).startswith(f"{path}:3: expected one JSON object, got ")


@pytest.mark.parametrize(
    "garbage", [b"\xff\xfe\n", b"\n", b"[1, 2]\n", b"7\n"], ids=["bytes", "empty", "list", "number"]
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, garbage: bytes) -> None:
    """Whatever it is, the reader must not die of it."""
    path = write_rank(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = garbage
    path.write_bytes(b"".join(lines))
    assert message_of(path).startswith(f"{path}:4: ")


def test_a_newer_schema_is_refused_before_its_fields_are_looked_at(tmp_path: Path) -> None:
    """Its fields may mean something else."""
    path = write_rank(tmp_path)
    newer = SCHEMA_VERSION + 1
    change_line(path, 1, lambda record: record.update(schema=newer, more=1))
    assert (
        message_of(path) == f"{path}:1: expected trace schema 2 or {SCHEMA_VERSION}, got {newer}."
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.pop("unit"), "Expected field 'unit' in a unshard record, got none."),
        (lambda r: r.update(op="gather"), "got 'gather'."),
        (lambda r: r.pop("op"), "got None."),
        (
            lambda r: r.update(stream=True),
            "Expected int in field 'stream' of a unshard record, got True.",
        ),
        (
            lambda r: r.update(gathered=1),
            "Expected bool in field 'gathered' of a unshard record, got 1.",
        ),
        (
            lambda r: r.update(unit=None),
            "Expected str in field 'unit' of a unshard record, got None.",
        ),
        (lambda r: r.update(time=0.5), "Expected no further fields in a unshard record, got time."),
        (lambda r: r.update(seq=7), "expected seq 2, got 7."),
        (lambda r: r.update(seq=True), "Expected an integer 'seq', got True."),
        (lambda r: r.pop("seq"), "Expected an integer 'seq', got None."),
    ],
    ids=[
        "missing-field",
        "unknown-op",
        "no-op",
        "bool-for-int",
        "int-for-bool",
        "none-for-str",
        "unknown-field",
        "gap",
        "bool-for-seq",
        "no-seq",
    ],
)
def test_a_broken_record_is_named_by_file_line_and_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """A trace has a hundred thousand lines."""
    path = write_rank(tmp_path)
    change_line(path, 3, change)
    message = message_of(path)
    assert message.startswith(f"{path}:3: ")
    assert message.endswith(reason)


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    """Its rank is not known."""
    path = write_rank(tmp_path)
    path.write_text('{"seq":0,"op":"fence","stream":1}\n')
    assert message_of(path) == f"{path}:1: expected a header record, got none."


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    """No run leaves one: the header is written at once."""
    path = trace_path(tmp_path, 0)
    path.touch()
    assert message_of(path) == f"{path}:1: expected a header record, got none."


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """With the system's reason."""
    path = trace_path(tmp_path, 0)
    assert message_of(path) == f"{path}: cannot read the trace: No such file or directory."


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    """A comparison over ranks would silently leave it out."""
    for rank in (0, 2):
        write_rank(tmp_path, rank, 3)
    with pytest.raises(TraceError) as raised:
        read_traces(tmp_path)
    assert str(raised.value) == f"{tmp_path}: expected the ranks 0 to 2, got [0, 2]."


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    """A mistyped folder must not look like a run without violations."""
    with pytest.raises(TraceError, match=r"expected rank\*\.jsonl files, got none"):
        read_traces(tmp_path)


# -- values that no run writes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"op": "fence", "stream": -1},
            (
                "Expected an integer of at least 0 and below 2**63 in field 'stream' of a fence "
                "record, got -1."
            ),
        ),
        (
            {"op": "fence", "stream": 2**63},
            (
                "Expected an integer of at least 0 and below 2**63 in field 'stream' of a fence "
                f"record, got {2**63}."
            ),
        ),
        (
            {"op": "kernel", "stream": 0, "name": "mm", "reads": [[[]]], "writes": []},
            "Expected a list of numbers from 0 in field 'reads' of a kernel record, got [[[]]].",
        ),
        (
            {
                "op": "kernel",
                "stream": 0,
                "name": "mm",
                "reads": [],
                "writes": [],
                "shapes": [-1],
            },
            (
                "Expected shapes like [\"bf16\", 64, 32] in field 'shapes' of a kernel record, got "
                "[-1]."
            ),
        ),
        (
            {"op": "group", "group": "dp", "ranks": []},
            "Expected at least one rank in field 'ranks' of a group record, got [].",
        ),
        (
            {"op": "gradients", "unit": "a", "present": [1], "missing": []},
            "Expected a list of texts in field 'present' of a gradients record, got [1].",
        ),
        (
            {"op": "header", "schema": SCHEMA_VERSION, "rank": 0, "world_size": 1, "scenario": {}},
            "expected one header record, got another one.",
        ),
    ],
    ids=["negative", "huge", "nested", "shape", "nobody", "no text", "second header"],
)
def test_a_value_that_no_run_writes_is_named(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    """A reader that counts with it would end in a traceback."""
    path = write_rank(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = json.dumps({"seq": 1, **record}) + "\n"
    path.write_text("".join(lines))
    assert message_of(path) == f"{path}:2: {reason}"


def test_a_record_nested_too_deep_is_named(tmp_path: Path) -> None:
    """The decoder gives up with an error of its own."""
    path = write_rank(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = "[" * 100_000 + "]" * 100_000 + "\n"
    path.write_text("".join(lines))
    assert message_of(path).startswith(f"{path}:2: expected one JSON object, got b'[[[[")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world_size": 0}, "of at least 1 and below 2**63 in field 'world_size'"),
        ({"rank": 1}, "expected a rank below 1, got 1."),
        ({"scenario": {"num_microbatches": "4"}}, "a number from 1 as 'num_microbatches'"),
        ({"scenario": {"a": [[1]]}}, "settings that are no deeper than a list"),
        ({"bounds": {"unsharded": None}}, "numbers from 0 in field 'bounds'"),
        ({"target": 7}, "Expected str in field 'target'"),
    ],
)
def test_a_header_of_nonsense_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """Checks count with what it says."""
    path = write_rank(tmp_path)
    change_line(path, 1, lambda record: record.update(change))
    message = message_of(path)
    assert message.startswith(f"{path}:1: ")
    assert reason in message


def test_a_world_of_very_many_ranks_is_refused_at_once(tmp_path: Path) -> None:
    """Its ranks are not listed to be compared."""
    path = write_rank(tmp_path)
    change_line(path, 1, lambda record: record.update(world_size=10**15))
    with pytest.raises(TraceError, match=r"expected the ranks 0 to 9+, got \[0\]\.$"):
        read_traces(tmp_path)


# -- runs that are not whole ------------------------------------------------------------------


def test_the_header_says_what_ran(tmp_path: Path) -> None:
    """Readers find it beside the scenario."""
    path = write_rank(tmp_path)
    more = {"target": "native", "megatron": "0.20.0", "tree": None, "peers": "simulated"}
    change_line(path, 1, lambda record: record.update(more))
    assert read_trace(path).header == more


def test_a_rank_that_ran_alone_is_read_alone(tmp_path: Path) -> None:
    """Something stood for its peers, so no file of theirs is missing."""
    path = write_rank(tmp_path, 3, 8)
    change_line(path, 1, lambda record: record.update(peers="loopback"))
    [trace] = read_traces(tmp_path)
    assert (trace.rank, trace.world_size, why_not_whole([trace])) == (3, 8, [])


def test_an_end_that_counts_otherwise_is_no_whole_run(tmp_path: Path) -> None:
    """Lines may have been cut out and numbered anew."""
    path = write_rank(tmp_path)
    change_line(path, 5, lambda record: record.update(records=9))
    assert why_not_whole(read_traces(tmp_path)) == [
        "cut short on rank 0: the end counts 9 records before it, not 4"
    ]


def test_a_trace_of_a_header_is_no_whole_run(tmp_path: Path) -> None:
    """Nothing was recorded, so nothing was right."""
    recorder = Recorder(JsonlSink(trace_path(tmp_path, 0)))
    recorder.header(rank=0, world_size=1, scenario=SCENARIO)
    recorder.close()
    assert why_not_whole(read_traces(tmp_path)) == ["nothing recorded on rank 0 but its header"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scenario": {**SCENARIO, "lr": 0.5}}, "lr is 0.5 and 0.001 on rank 0"),
        ({"world_size": 3}, "world_size is 3 and 2 on rank 0"),
        ({"target": "native"}, "target is 'native' and None on rank 0"),
    ],
)
def test_ranks_of_two_runs_are_no_whole_run(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """A folder in which an older run left a file."""
    write_rank(tmp_path, 0, 2)
    change_line(write_rank(tmp_path, 1, 2), 1, lambda record: record.update(change))
    assert why_not_whole(read_traces(tmp_path)) == [f"rank 1 is of another run: {reason}"]


# -- an older schema --------------------------------------------------------------------------


def test_a_trace_of_the_schema_before_is_read_as_one_of_this(tmp_path: Path) -> None:
    """It named a storage in one text; the two fields stand where that stood, as if written now."""
    path = write_rank(tmp_path)
    change_line(path, 1, lambda record: record.update(schema=2))
    named = {"seq": 2, "op": "name", "storage": 7, "name": "decoder.layers.0:full weight"}
    named["bytes"] = 64
    change_line(path, 3, lambda record: (record.clear(), record.update(named)))
    assert list(read_trace(path).records[1].items()) == [
        ("seq", 2),
        ("op", "name"),
        ("storage", 7),
        ("unit", "decoder.layers.0"),
        ("kind", "full weight"),
        ("bytes", 64),
    ]


def test_a_name_in_one_text_is_refused_in_this_schema(tmp_path: Path) -> None:
    """Only an older trace may have it."""
    path = write_rank(tmp_path)
    named = {"seq": 2, "op": "name", "storage": 7, "name": "decoder.layers.0:full weight"}
    change_line(path, 3, lambda record: (record.clear(), record.update(named)))
    assert message_of(path).endswith("Expected field 'unit' in a name record, got none.")


@pytest.mark.parametrize("version", [1, None, "3", True, 3.0])
def test_a_schema_that_nobody_knows_is_refused(tmp_path: Path, version: object) -> None:
    """By name."""
    path = write_rank(tmp_path)
    change_line(path, 1, lambda record: record.update(schema=version))
    assert message_of(path) == f"{path}:1: expected trace schema 2 or 3, got {version!r}."


def test_any_record_about_a_unit_may_name_its_chunk(tmp_path: Path) -> None:
    """And no other."""
    path = write_rank(tmp_path)
    change_line(path, 3, lambda record: record.update(chunk=1))
    assert read_trace(path).records[1]["chunk"] == 1
    change_line(path, 2, lambda record: record.update(chunk=1))
    assert message_of(path).endswith("Expected no further fields in a step record, got chunk.")
