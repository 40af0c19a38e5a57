"""One rank as a process of its own: `sim.world.gloo` starts it and reads what it reports."""
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
        from sim.world.gloo_transport import LostRankError
        from sim.world.world import describe

        reports.send(
            "failed",
            problem=describe(orders["rank"], error),
            raised=type(error).__name__,
            is_lost=isinstance(error, LostRankError),
        )
    watcher.join()


def _run(orders: dict[str, Any], reports: _Reports) -> dict[str, Any]:
    from sim.quiet import quiet

    quiet()
    import gc
    import time

    import torch
    from torch._C._distributed_c10d import FileStore

    from real.config import Scenario
    from real.trace import JsonlSink, trace_path
    from sim.megatron import megatron_on_fake_cuda, rank_state
    from sim.rank import run_rank
    from sim.world.gloo_transport import Gloo
    from sim.world.process_group import init_process_group
    from sim.world.state import torch_state
    from sim.world.world import run_as_rank

    scenario = Scenario(**orders["scenario"])
    rank: int = orders["rank"]
    board = BoardFile(Path(orders["board"]))
    torch.set_num_threads(1)
    num_records = 0
    with megatron_on_fake_cuda():
        from real.mcore.observe import recorded_nodes

        gc.freeze()  # as in process
        started = time.perf_counter()
        state = [*torch_state(), *rank_state()]
        store = FileStore(orders["store"], scenario.world_size)
        host = _Host(Gloo(store, rank, orders["timeout_s"], board))

        def train(is_reference: bool) -> list[dict[str, float]]:
            nonlocal num_records
            label = "reference" if is_reference else "scenario"

            def on_step(step: int) -> None:
                if rank == 0:
                    text = f"{label}: step {step + 1} of {scenario.train_iters}"
                    reports.send("progress", text=text)

            file = None
            if orders["trace"] is not None and not is_reference:
                file = JsonlSink(trace_path(Path(orders["trace"]), rank))
            sink = _Counting(file)
            outputs = run_as_rank(
                host,
                rank,
                state,
                lambda: run_rank(
                    scenario,
                    rank,
                    is_reference=is_reference,
                    sink=sink,
                    start=init_process_group,
                    on_step=on_step,
                ),
            )
            if not is_reference:
                num_records = sink.num_records
            return _save(Path(orders["results"]), label, outputs)

        with recorded_nodes():
            losses = train(is_reference=False)
        references = train(is_reference=True)
    board.post("finished", is_waiting=True)
    return {
        "scenario": losses,
        "reference": references,
        "num_records": num_records,
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
