"""The same scenario as real processes: one per rank, data over torch's gloo.

The processes train and report; this side starts them, watches them and ends them all at the first
failure. Nothing that comes from a process is unpickled: numbers arrive as JSON, arrays as arrays.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from real.config import Scenario, ScenarioError
from real.output import JobOutput, StepOutput
from real.result import RunResult, judge
from real.trace import Sink, trace_path
from sim.session.gloo_rank import BOARD_BYTES, BoardFile
from sim.session.options import DEFAULTS, Progress, RunOptions, no_progress
from sim.session.sinks import clear_folder
from sim.world import ErrorKind, WorldError

_ROOT: Final = Path(__file__).parents[2]
_TIMEOUT_S: Final = 120.0
"""For one message; a process that dies or hangs is noticed long before."""
_STALL_S: Final = 5.0
"""All processes wait and none moves for this long: a deadlock."""
_GRACE_S: Final = 1.0
"""How long to wait for the cause when a process only says that another one is lost."""
_POLL_S: Final = 0.1
_STDERR_LINES: Final = 5


@dataclass(kw_only=True)
class _Process:
    rank: int
    folder: Path
    popen: subprocess.Popen[bytes]
    reports: int
    board: BoardFile
    unread: bytes = b""
    done: dict[str, Any] | None = None

    def standing(self) -> str:
        if self.done is not None:
            return "finished"
        return self.board.read()[2] or "starting"

    def last_words(self) -> str:
        lines = (self.folder / "stderr").read_text(errors="replace").strip().splitlines()
        return "".join(f"\n    {line}" for line in lines[-_STDERR_LINES:])


@dataclass(kw_only=True)
class _Failure:
    kind: ErrorKind
    rank: int | None
    problem: str
    raised: str | None = None


@dataclass(kw_only=True)
class _Fleet:
    processes: list[_Process] = field(default_factory=list)

    def standing(self, failure: _Failure) -> list[str]:
        return [
            f"rank {p.rank}: raised {failure.raised}, {p.standing()}"
            if p.rank == failure.rank and failure.raised
            else f"rank {p.rank}: {p.standing()}"
            for p in self.processes
        ]

    def stop(self) -> None:
        """Ends every process and waits for each one."""
        for process in self.processes:
            process.popen.kill()
        for process in self.processes:
            process.popen.wait()
            if process.popen.stdin is not None:
                try:
                    process.popen.stdin.close()
                except BrokenPipeError:
                    pass
            os.close(process.reports)
        self.processes = []


def run_gloo(
    scenario: Scenario,
    options: RunOptions = DEFAULTS,
    *,
    out: Path | None,
    sinks: Sequence[Sink | None] = (),
    progress: Progress = no_progress,
) -> RunResult:
    """Runs all ranks of a scenario, and then of its reference, as processes on this machine.

    Args:
        scenario: The run.
        options: How it is run, without faults; its subject is one that `find_subject` knows.
        out: The folder of the trace; each process writes its own file there unless there are sinks.
        sinks: Where each rank's records go after the run; none to leave them in `out`.
        progress: Shown one line of text now and then.

    Raises:
        WorldError: A rank failed or died, or the ranks do not agree. No process is left.
        ScenarioError: Faults are asked for, which only ranks in one process can have.
    """
    if options.faults:
        raise ScenarioError(f"Expected no faults of gloo processes, got {len(options.faults)}.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gloo-")))
        fleet = _Fleet()
        stack.callback(fleet.stop)
        trace = folder if any(sinks) else out
        if trace is not None and trace is not folder:
            clear_folder(trace)
        for rank in range(scenario.world_size):
            fleet.processes.append(_start(scenario, options, rank, folder, trace))
        failure = _watch(fleet, progress)
        if failure is not None:
            raise WorldError(
                failure.problem,
                kind=failure.kind,
                rank=failure.rank,
                standing=fleet.standing(failure),
                replay=options.replay,
            )
        reports = [process.done or {} for process in fleet.processes]
        outputs, references = (
            [_load(process.folder, label, process.done or {}) for process in fleet.processes]
            for label in ("scenario", "reference")
        )
        for rank, sink in enumerate(sinks):
            _copy_records(trace_path(folder, rank), sink)
    return judge(
        outputs,
        references,
        num_records=sum(report["num_records"] for report in reports),
        wall_s=max(report["wall_s"] for report in reports),
        trace=out,
        reference=options.reference,
    )


def _start(
    scenario: Scenario, options: RunOptions, rank: int, folder: Path, trace: Path | None
) -> _Process:
    own = folder / f"process{rank}"
    own.mkdir()
    (own / "board").write_bytes(bytes(BOARD_BYTES))
    reports, child_end = os.pipe()
    try:
        with (own / "stderr").open("wb") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "sim.session.gloo_rank"],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[child_end],
                start_new_session=True,  # ctrl-C reaches this process, which ends the others
            )
    finally:
        os.close(child_end)
    process = _Process(
        rank=rank, folder=own, popen=popen, reports=reports, board=BoardFile(own / "board")
    )
    orders = {
        "scenario": scenario.as_dict(),
        "subject": options.subject.name,
        "reference": options.reference,
        "tree": None if options.tree is None else str(options.tree.resolve()),
        "kernel_steps": list(options.recorded_steps(scenario)),
        "records_shapes": options.records_shapes,
        "rank": rank,
        "reports": child_end,
        "board": str(own / "board"),
        "store": str(folder / "store"),
        "results": str(own),
        "trace": None if trace is None else str(trace.resolve()),
        "timeout_s": _TIMEOUT_S,
    }
    assert popen.stdin is not None
    popen.stdin.write(json.dumps(orders).encode() + b"\n")
    popen.stdin.flush()
    return process


def _watch(fleet: _Fleet, progress: Progress) -> _Failure | None:
    """Reads reports until all processes are done or one fails; returns the first cause."""
    lost: _Failure | None = None
    give_up = float("inf")
    still_since = time.monotonic()
    boards: list[tuple[int, bool, str]] = []
    with selectors.DefaultSelector() as selector:
        for process in fleet.processes:
            selector.register(process.reports, selectors.EVENT_READ, process)
        while any(process.done is None for process in fleet.processes):
            for key, _ in selector.select(_POLL_S):
                failure = _read(key.data, progress)
                if failure is not None:
                    selector.unregister(key.fd)
                    if failure.kind is not ErrorKind.LOST:
                        return failure
                    lost = lost or failure
                    give_up = min(give_up, time.monotonic() + _GRACE_S)
            now = time.monotonic()
            if now > give_up:
                return lost
            newest = [process.board.read() for process in fleet.processes]
            if newest != boards or not all(is_waiting for _, is_waiting, _ in newest):
                boards, still_since = newest, now
            elif now - still_since > _STALL_S:
                waiting = [str(p.rank) for p in fleet.processes if p.done is None]
                problem = f"Deadlock: no rank can go on; waiting: {', '.join(waiting)}."
                return _Failure(kind=ErrorKind.DEADLOCK, rank=None, problem=problem)
    return None


def _read(process: _Process, progress: Progress) -> _Failure | None:
    """Takes what a process has reported; returns its failure, or None."""
    data = os.read(process.reports, 1 << 16)
    if not data and process.done is None:
        status = process.popen.wait()
        problem = f"Rank {process.rank} died with exit status {status}.{process.last_words()}"
        return _Failure(kind=ErrorKind.DIED, rank=process.rank, problem=problem)
    *lines, process.unread = (process.unread + data).split(b"\n")
    for line in lines:
        report = json.loads(line)
        if report["kind"] == "progress":
            progress(report["text"])
        elif report["kind"] == "done":
            process.done = report
        else:
            return _Failure(
                kind=ErrorKind(report["error"]),
                rank=process.rank,
                problem=report["problem"],
                raised=report["raised"],
            )
    return None


def _load(folder: Path, label: str, report: dict[str, Any]) -> JobOutput:
    steps = [
        StepOutput(
            loss=numbers["loss"],
            grad_norm=numbers["grad_norm"],
            gradients=_load_arrays(folder / f"{label}{step}.npz"),
        )
        for step, numbers in enumerate(report[label])
    ]
    return JobOutput(steps=steps, weights=_load_arrays(folder / f"{label}.npz"))


def _load_arrays(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        names = arrays["names"].tolist()
        return {name: torch.from_numpy(arrays[str(i)]) for i, name in enumerate(names)}


def _copy_records(path: Path, sink: Sink | None) -> None:
    if sink is None:
        return
    with path.open(encoding="ascii") as file:
        for line in file:
            sink.write(json.loads(line))
    sink.close()
