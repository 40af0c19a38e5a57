"""What is watched of any target's job, whatever is underneath."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel.utils import get_comm_stream

from real.watch.points import Call, Point
from real.watch.records import gradient_read_point, optimizer_point, record_stream_role


def job_points(job_type: type) -> Sequence[Point]:
    """Returns what to watch of a job class: its readers of gradients, its optimizer, its streams.

    The combined schedule makes the stream of the token exchange before each of its steps.
    """
    return (
        gradient_read_point(job_type, "gradients", by="gradients"),
        gradient_read_point(job_type, "clip", by="clip"),
        optimizer_point(job_type, "optimizer_step"),
        Point(owner=combined_1f1b, name="set_streams", after=_record_communication),
    )


def _record_communication(_: Call) -> None:
    stream = get_comm_stream()
    if stream is not None:
        record_stream_role(stream, "communication")
