"""Records what code does by watching its own methods, so that it need not tell."""

from real.watch.points import Call, Point, watched
from real.watch.records import (
    UnitView,
    fence_point,
    gradient_read_point,
    optimizer_point,
    record_stream_role,
    reduce_point,
    reshard_point,
    unshard_point,
)

__all__ = [
    "Call",
    "Point",
    "UnitView",
    "fence_point",
    "gradient_read_point",
    "optimizer_point",
    "record_stream_role",
    "reduce_point",
    "reshard_point",
    "unshard_point",
    "watched",
]
