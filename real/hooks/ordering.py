"""The few stream moves of the hooks, one named function each."""

from __future__ import annotations

import torch

from real.hooks.unit import FsdpContext, FsdpUnit


def fork_all_gather(context: FsdpContext) -> None:
    """The all-gather stream waits for the current stream: the optimizer has written the weights."""
    context.all_gather_stream.wait_stream(torch.cuda.current_stream())


def fork_reduce_scatter(context: FsdpContext) -> None:
    """The reduce-scatter stream waits for the current stream, so that it joins a graph capture."""
    context.reduce_scatter_stream.wait_stream(torch.cuda.current_stream())


def join_unshard(unit: FsdpUnit) -> None:
    """The current stream waits for the unit's own gather, and for nothing issued after it."""
    assert unit.unshard_event is not None, "join_unshard() comes after unshard()"
    torch.cuda.current_stream().wait_event(unit.unshard_event)


def join_reduce_scatter(context: FsdpContext) -> None:
    """The current stream waits for every reduction launched so far: gradients may be read."""
    torch.cuda.current_stream().wait_stream(context.reduce_scatter_stream)
