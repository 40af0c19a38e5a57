"""`python -m sim host`: the host's time of a step, by what it was spent on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from real.trace import JsonlSink, OpKind, Recorder, trace_path

if TYPE_CHECKING:
    from tests.cli.conftest import Outcome

STORY: list[tuple[int, OpKind, dict[str, Any]]] = [
    (0, OpKind.STEP, {"step": 0, "event": "begin"}),
    (100, OpKind.HOOK, {"point": "pre_forward", "module": "a", "unit": "u"}),
    (110, OpKind.NVTX_PUSH, {"text": "MFSDP u unshard"}),
    (140, OpKind.STREAM_WAIT, {"stream": 1, "on": 0}),
    (180, OpKind.NVTX_POP, {}),
    (185, OpKind.UNSHARD, {"unit": "u", "stream": 0, "gathered": True}),
    (385, OpKind.STEP, {"step": 0, "event": "end"}),
]


def write(
    folder: Path, *, has_times: bool, story: Sequence[tuple[int, OpKind, dict[str, Any]]] = STORY
) -> None:
    recorder = Recorder(JsonlSink(trace_path(folder, 0)))
    recorder.header(rank=0, world_size=1, scenario={})
    for at, op, fields in story:
        recorder.record(op, **fields, **({"host_ns": at} if has_times else {}))
    recorder.close()


def test_time_belongs_to_what_was_done_after_a_record(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """All of a call's time is the call's, whatever it records inside."""
    write(tmp_path, has_times=True)
    done = json.loads(sim("host", tmp_path, "--json").out)
    assert done["step_ns"] == 385
    assert {cost["what"]: (cost["calls"], cost["total_ns"]) for cost in done["costs"]} == {
        "modules and schedule": (0, 300),
        "MFSDP unshard": (1, 75),
        "our hooks: pre_forward": (1, 10),
    }


def test_the_end_of_a_step_that_did_not_begin_is_passed_over(
    sim: Callable[..., Outcome], tmp_path: Path
) -> None:
    """As in a trace whose recorder came in the middle of a step."""
    late = [(at + 10, op, fields) for at, op, fields in STORY]
    write(tmp_path, has_times=True, story=[(5, STORY[-1][1], STORY[-1][2]), *late])
    assert json.loads(sim("host", tmp_path, "--json").out)["step_ns"] == 385
    write(tmp_path, has_times=True, story=STORY[1:])
    done = sim("host", tmp_path)
    assert (done.status, done.err) == (2, "sim: rank 0: expected a complete step, got none.\n")


def test_a_trace_without_times_is_refused(sim: Callable[..., Outcome], tmp_path: Path) -> None:
    write(tmp_path, has_times=False)
    done = sim("host", tmp_path)
    assert done.status == 2
    assert done.err == (
        "sim: rank 0: expected host times, got records without; "
        "torchrun -m real trace --durations records them.\n"
    )


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """As with `python -m sim check TRACE | head`."""
    write(tmp_path, has_times=True)
    command = f"{sys.executable} -m sim host {tmp_path} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
