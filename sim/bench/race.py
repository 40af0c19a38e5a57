"""How fast the race engine judges kernels, beside torch's stream sanitizer on the same kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from real.config import Scenario
from real.trace import OpKind, Trace
from real.trace.recorder import Record
from sim.bench.figure import Figure, make_figure

_SCENARIO: Final = Scenario(num_layers=4, num_microbatches=4, train_iters=2, world_size=2)
_REPEATS: Final = 5


def race_figures() -> list[Figure]:
    """Judges one rank's trace by turns with both engines; the best of five of each.

    The sanitizer is driven by hand with the same launches, allocations, records and waits, and
    without the dispatch mode that finds them on a GPU. It takes a stack trace at each launch, which
    is part of what it does.
    """
    from sim.checks.storage import check_storage

    trace = _trace_with_kernels()
    num_kernels = sum(record["op"] == OpKind.KERNEL for record in trace.records)
    ours, theirs = [], []
    for _ in range(_REPEATS):
        started = time.process_time()
        found = check_storage([trace])
        ours.append(time.process_time() - started)
        assert not found, found
        started = time.process_time()
        num_errors = _drive_sanitizer(trace.records)
        theirs.append(time.process_time() - started)
        assert not num_errors, num_errors
    return [
        make_figure(
            "race engine",
            num_kernels / min(ours),
            "kernel records/s",
            peer="torch.cuda._sanitizer EventHandler",
            peer_value=num_kernels / min(theirs),
        )
    ]


def _trace_with_kernels() -> Trace:
    from sim.session.options import RunOptions
    from sim.session.run import record_traces

    return record_traces(_SCENARIO, RunOptions(kernel_steps=None))[0]


def _drive_sanitizer(records: Sequence[Record]) -> int:
    """Gives the records to the sanitizer's handler; returns the number of its errors."""
    from torch.cuda._sanitizer import EventHandler

    handler = EventHandler()
    aliases: dict[int, list[str]] = defaultdict(list)
    seen: set[int] = set()
    num_errors = 0
    for record in records:
        op = record["op"]
        if op in (OpKind.KERNEL, OpKind.COLLECTIVE):
            written = set(record["writes"])
            read = set(record["reads"]) - written
            for storage in (read | written) - seen:
                # The handler warns about memory that it did not see being allocated.
                seen.add(storage)
                handler._handle_memory_allocation(storage + 1)
            num_errors += len(
                handler._handle_kernel_launch(
                    record["stream"],
                    {storage + 1 for storage in read},
                    {storage + 1 for storage in written},
                    set(),
                    "kernel",
                    aliases,
                )
            )
        elif op == OpKind.FREE and record["storage"] in seen:
            seen.discard(record["storage"])
            handler._handle_memory_deallocation(record["storage"] + 1)
        elif op == OpKind.STREAM and record["stream"]:
            handler._handle_stream_creation(record["stream"])
        elif op == OpKind.EVENT_RECORD:
            # An event a record: a wait refers to a record, which the handler cannot tell apart.
            handler._handle_event_creation(record["seq"])
            handler._handle_event_record(record["seq"], record["stream"])
        elif op == OpKind.EVENT_WAIT and record["record"] is not None:
            handler._handle_event_wait(record["record"], record["stream"])
        elif op == OpKind.STREAM_WAIT:
            handler._handle_event_creation(record["seq"])
            handler._handle_event_record(record["seq"], record["on"])
            handler._handle_event_wait(record["seq"], record["stream"])
        elif op == OpKind.HOST_SYNC and record["what"] == "device":
            handler._handle_device_synchronization()
        elif op == OpKind.HOST_SYNC and record["what"] == "stream":
            handler._handle_stream_synchronization(record["on"])
    return num_errors
