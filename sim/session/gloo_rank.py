"""One rank as a process of its own: `sim.session.gloo` starts it and reads what it reports."""
# ruff: noqa: BLE001 - whatever goes wrong is reported to the parent

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from real.output import JobOutput

_WAITING_OFFSET = 4
_LENGTH_OFFSET = 5
_TEXT_OFFSET = 7
BOARD_BYTES = 2048


class BoardFile:
    """A file in shared memory that says where one rank stands; its parent reads it at any time."""

    def __init__(self, path: Path) -> None:
        import mmap

        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), BOARD_BYTES)

    def post(self, standing: str, *, is_waiting: bool) -> None:
        """Replaces what was posted before."""
        text = standing.encode("ascii", "replace")[: BOARD_BYTES - _TEXT_OFFSET]
        count = int.from_bytes(self._map[:_WAITING_OFFSET], "little") + 1 & 0xFFFFFFFF
        self._map[: _TEXT_OFFSET + len(text)] = (
            count.to_bytes(4, "little")
            + bytes([is_waiting])
            + len(text).to_bytes(2, "little")
            + text
        )

    def read(self) -> tuple[int, bool, str]:
        """Returns a count of posts, whether the rank waits, and where it stands."""
        head = self._map[:_TEXT_OFFSET]
        length = int.from_bytes(head[_LENGTH_OFFSET:], "little")
        text = self._map[_TEXT_OFFSET : _TEXT_OFFSET + length].decode("ascii", "replace")
        return int.from_bytes(head[:_WAITING_OFFSET], "little"), bool(head[_WAITING_OFFSET]), text


class _Reports:
    """Lines of JSON to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, kind: str, **fields: Any) -> None:
        os.write(self._descriptor, json.dumps({"kind": kind, **fields}).encode() + b"\n")


class _Host:
    """Stands for the world in this process: it has one rank and its transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def transport_of(self, rank: int) -> Any:
        """Returns the transport of the only rank."""
        return self._transport


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()  # returns when the parent closes its end or is gone
    os._exit(0)


def main() -> None:
    """Reads the orders on standard input, trains, reports, and stays until the parent lets go.

    A process that left early would look like a lost one to the others.
    """
    orders = json.loads(sys.stdin.buffer.readline() or b"null")
    if orders is None:
        return
    watcher = threading.Thread(target=_exit_with_parent, daemon=True)
    watcher.start()
    reports = _Reports(orders["reports"])
    try:
        reports.send("done", **_run(orders, reports))
    except BaseException as error:
        from sim.world.world import describe

        reports.send(
            "failed",
            problem=describe(orders["rank"], error),
            raised=type(error).__name__,
            error=_kind_of(error),
        )
    watcher.join()


def _kind_of(error: BaseException) -> str:
    from sim.world import ErrorKind, MismatchError
    from sim.world.gloo_transport import LostRankError

    if isinstance(error, LostRankError):
        return ErrorKind.LOST
    return ErrorKind.MISMATCH if isinstance(error, MismatchError) else ErrorKind.FAILED


def _run(orders: dict[str, Any], reports: _Reports) -> dict[str, Any]:
    from sim.quiet import quiet

    quiet()
    import time

    import torch
    from torch._C._distributed_c10d import FileStore

    from real.config import Scenario
    from real.reference import Reference
    from real.trace import JsonlSink, trace_path
    from sim.session.megatron import frozen_imports, megatron_on_fake_cuda, rank_state
    from sim.session.options import no_progress
    from sim.session.rank import RankPlan, run_rank
    from sim.session.subject import find_subject, reference_subject
    from sim.world.gloo_transport import Gloo
    from sim.world.state import torch_state
    from sim.world.world import run_as_rank

    scenario = Scenario(**orders["scenario"])
    rank: int = orders["rank"]
    board = BoardFile(Path(orders["board"]))
    torch.set_num_threads(1)
    tree = None if orders["tree"] is None else Path(orders["tree"])
    with megatron_on_fake_cuda(tree), frozen_imports():
        started = time.perf_counter()
        state = [*torch_state(), *rank_state()]
        store = FileStore(orders["store"], scenario.world_size)
        host = _Host(Gloo(store, rank, orders["timeout_s"], board))

        def show(text: str) -> None:
            reports.send("progress", text=text)

        def train(plan: RankPlan, sink: _Counting) -> list[dict[str, float]]:
            progress = show if rank == 0 else no_progress
            with plan.subject.watching():
                outputs = run_as_rank(
                    host,
                    rank,
                    state,
                    lambda: run_rank(scenario, plan, rank, sink=sink, progress=progress),
                )
            return _save(Path(orders["results"]), plan.subject.label, outputs)

        folder = orders["trace"]
        file = None if folder is None else JsonlSink(trace_path(Path(folder), rank))
        sink = _Counting(file)
        plan = RankPlan(
            subject=find_subject(orders["subject"]),
            kernel_steps=orders["kernel_steps"],
            records_shapes=orders["records_shapes"],
        )
        losses = train(plan, sink)
        reference = reference_subject(Reference(orders["reference"]))
        references = train(RankPlan(subject=reference), _Counting(None))
    board.post("finished", is_waiting=True)
    return {
        "scenario": losses,
        "reference": references,
        "num_records": sink.num_records,
        "wall_s": time.perf_counter() - started,
    }


class _Counting:
    """Counts records on their way to a file."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.num_records = 0

    def write(self, record: dict[str, Any]) -> None:
        """Takes one record."""
        self.num_records += 1
        if self._sink is not None:
            self._sink.write(record)

    def close(self) -> None:
        """Closes the file."""
        if self._sink is not None:
            self._sink.close()


def _save(folder: Path, label: str, output: JobOutput) -> list[dict[str, float]]:
    """Writes gradients and weights as plain arrays and returns the other numbers."""
    for step, numbers in enumerate(output.steps):
        _save_arrays(folder / f"{label}{step}.npz", numbers.gradients)
    _save_arrays(folder / f"{label}.npz", output.weights)
    return [{"loss": numbers.loss, "grad_norm": numbers.grad_norm} for numbers in output.steps]


def _save_arrays(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    import numpy as np

    # Names may be any text, also "file": savez would take that one for its own argument.
    names = list(tensors)
    arrays: dict[str, Any] = {str(i): tensors[name].numpy() for i, name in enumerate(names)}
    np.savez(path, names=np.array(names, dtype=str), **arrays)


if __name__ == "__main__":
    main()
