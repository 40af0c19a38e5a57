"""A rank that makes no progress says where it stands and ends the job; so does one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from real.trace import OpKind, Recorder
from real.trace.recent import RecentSink

ROOT = Path(__file__).parents[2]

BODY = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from real.gpu.watchdog import watched
from real.trace import OpKind, active_recorder

{start}
rank = dist.get_rank()
with watched(timeout_s=float(sys.argv[2]), folder=Path(sys.argv[1])) as progress:
    for step in range(3):
        active_recorder().record(OpKind.NODE, name="mlp", direction="forward", layer=str(step))
        dist.all_reduce(torch.ones(4))
        if step == 1 and {condition}:
            {action}
        dist.barrier()
        progress(f"step {{step}}")
dist.destroy_process_group()
"""


def launch(
    tmp_path: Path,
    *,
    condition: str,
    action: str = "pass",
    timeout_s: float = 2.0,
    is_alone: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs two gloo processes under torchrun, or one without it."""
    script = tmp_path / "body.py"
    start = "dist.init_process_group('gloo')"
    if is_alone:
        start = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    script.write_text(BODY.format(start=start, condition=condition, action=action))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [
            sys.executable,
            *([] if is_alone else command),
            str(script),
            str(tmp_path / "standing"),
            str(timeout_s),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_skipped_collective_ends_the_job_with_where_each_rank_stands(tmp_path: Path) -> None:
    """A hang on a cluster costs hours when nobody says which call was not joined."""
    run = launch(tmp_path, condition="rank == 1", action="time.sleep(600)")
    assert run.returncode == 1
    reports = sorted((tmp_path / "standing").glob("rank*.txt"))
    # The launcher ends the other rank as soon as one has left: at least one has had its say.
    assert reports
    assert "made no progress for 2 s after step 0." in run.stderr
    text = "".join(path.read_text() for path in reports)
    assert "layer=1" in text
    said = [line for line in run.stderr.splitlines() if "last collective:" in line]
    for line in said:
        # Two collectives a step, numbered from 0: all_reduce is 2, and rank 1 never joins 3.
        rank = int(line.split("rank ")[1].split(",")[0])
        expected = ("n=3 kind=barrier", "n=2 kind=all_reduce")[rank]
        assert expected in line
    assert said
    assert "body.py" in text  # the stack of the thread that hangs


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_python_still_ends(tmp_path: Path) -> None:
    """Then no Python thread can say anything, and the report has the stacks only."""
    hold = "import ctypes; ctypes.PyDLL(None).sleep(600)"
    begun = time.monotonic()
    run = launch(tmp_path, condition="True", action=hold, timeout_s=1.0, is_alone=True)
    assert run.returncode == 1
    assert time.monotonic() - begun < 60
    text = "".join(path.read_text() for path in (tmp_path / "standing").glob("rank*.txt"))
    assert "Timeout" in text
    assert "body.py" in text


@pytest.mark.slow
def test_a_failing_rank_ends_the_job_with_its_message(tmp_path: Path) -> None:
    """And with where it stood, since the message alone rarely says which call it was."""
    run = launch(tmp_path, condition="rank == 1", action="raise ValueError('bad')", timeout_s=60.0)
    assert run.returncode == 1
    assert "ValueError: bad" in run.stderr
    assert "rank 1, last collective:" in run.stderr


@pytest.mark.slow
def test_a_job_that_goes_on_leaves_no_report(tmp_path: Path) -> None:
    """Nobody should find an old report and believe it."""
    run = launch(tmp_path, condition="False", timeout_s=60.0, is_alone=True)
    assert (run.returncode, (tmp_path / "standing").exists()) == (0, False), run.stderr


def test_the_newest_record_of_an_operation_outlives_the_others() -> None:
    """A unit's last gather may lie further back than the last records."""
    recent = RecentSink(size=2)
    recorder = Recorder(recent)
    recorder.record(OpKind.UNSHARD, unit="decoder", stream=0, gathered=True)
    for node in ("a", "b", "c"):
        recorder.record(OpKind.NODE_END, name=node, direction="forward")
    assert recent.lines() == [
        "#2 node_end name=b direction=forward",
        "#3 node_end name=c direction=forward",
    ]
    assert (recent.newest(OpKind.UNSHARD) or {})["unit"] == "decoder"
    assert recent.newest(OpKind.REDUCE) is None
