"""The recorder numbers what happens and keeps out what differs between equal runs."""

import gc
import weakref
from typing import NoReturn

import pytest

from real.trace import MemorySink, OpKind, Recorder, active_recorder, recording, validate_record
from real.trace.record import FIELDS


class Plan:
    """Stands for a schedule plan, of which each microbatch has one."""


def test_records_are_numbered_in_host_order() -> None:
    """The number is the only clock of a trace."""
    sink = MemorySink()
    recorder = Recorder(sink)
    recorder.header(rank=1, world_size=2, scenario={"seed": 7})
    recorder.record(OpKind.FENCE, stream=0)
    recorder.close()
    assert sink.records == [
        {
            "seq": 0,
            "op": "header",
            "schema": 3,
            "rank": 1,
            "world_size": 2,
            "scenario": {"seed": 7},
        },
        {"seq": 1, "op": "fence", "stream": 0},
        {"seq": 2, "op": "end", "records": 2},
    ]
    for record in sink.records:
        validate_record(record)


def test_a_recorder_without_a_sink_still_counts() -> None:
    """Numbers must not depend on whether anybody reads them."""
    recorder = Recorder()
    assert [recorder.record(OpKind.NVTX_POP) for _ in range(3)] == [0, 1, 2]


def test_microbatches_are_numbered_within_a_step_by_first_use() -> None:
    """The address of a plan differs from run to run, its turn does not."""
    recorder = Recorder()
    recorder.begin_step(0)
    first, second = Plan(), Plan()
    seen = [recorder.microbatch_of(plan) for plan in (first, second, first, None)]
    recorder.begin_step(1)
    assert seen == [0, 1, 0, None]
    assert recorder.microbatch_of(second) == 0


def test_a_plan_that_is_gone_keeps_its_number() -> None:
    """A new plan may get the address of an old one, but not its number."""
    recorder = Recorder()
    recorder.begin_step(0)
    plan = Plan()
    recorder.microbatch_of(plan)
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None
    assert recorder.microbatch_of(Plan()) == 1


def test_the_active_recorder_is_restored_after_an_error() -> None:
    """The next run would write into the trace of the one that failed."""
    outside = active_recorder()

    def fail(recorder: Recorder) -> NoReturn:
        with recording(recorder):
            assert active_recorder() is recorder
            raise KeyError

    with pytest.raises(KeyError):
        fail(Recorder())
    assert active_recorder() is outside


def test_no_field_of_a_record_is_a_time_or_an_address() -> None:
    """Equal runs write equal bytes, so a record may hold nothing that a run makes up.

    Real numbers are the mark of a clock; all other values are numbered by first appearance.
    """
    types = {
        (op, name, t) for op, fields in FIELDS.items() for name, ts in fields.items() for t in ts
    }
    assert {t for _, _, t in types} == {int, str, bool, dict, list, type(None)}
    # Containers hold what the caller fixes: the scenario, ranks, names, shapes, storage numbers.
    assert {name for _, name, t in types if t in (dict, list)} == {
        "scenario",
        "ranks",
        "reads",
        "writes",
        "names",
        "shape",
        "present",
        "missing",
    }


def test_every_operation_has_its_fields() -> None:
    """An operation without an entry could not be validated."""
    assert set(FIELDS) == set(OpKind)
