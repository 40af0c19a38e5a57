"""Writes the schedule's nodes and what is done with units into the active trace, in both modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from real.mcore.internals import NodeCall, observed_nodes
from real.trace import OpKind, active_recorder
from real.watch import Point, watched


@contextmanager
def recorded_nodes(points: Sequence[Point] | None = None) -> Iterator[None]:
    """Records every schedule node of the process, and what a table watches, for a block.

    What a built model is made of is recorded by its target.

    Args:
        points: What to watch; None for the table of our hooks.
    """
    if points is None:
        from real.mcore import watch_table

        points = watch_table.points()
    with watched(points), observed_nodes(_begin, _end):
        yield


def _begin(call: NodeCall) -> None:
    recorder = active_recorder()
    stream = torch.cuda.current_stream() if call.stream is None else call.stream
    recorder.record(
        OpKind.NODE,
        name=call.name,
        direction=call.direction,
        layer=call.layer,
        microbatch=recorder.microbatch_of(call.plan),
        chunk=call.chunk,
        phase=call.phase,
        stream=stream.stream_id,
    )


def _end(call: NodeCall) -> None:
    active_recorder().record(OpKind.NODE_END, name=call.name, direction=call.direction)
