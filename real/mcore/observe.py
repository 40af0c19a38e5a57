"""Writes the schedule's nodes into the active trace, in both modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from real.mcore.internals import NodeCall, observed_nodes
from real.trace import OpKind, active_recorder


@contextmanager
def recorded_nodes() -> Iterator[None]:
    """Records begin and end of every schedule node of the process for the length of the block."""
    with observed_nodes(_begin, _end):
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
