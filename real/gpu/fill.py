"""Fills what a collective writes from what this rank gives, as if all its peers gave the same.

Every element of an output gets a value, and a finite input makes a finite output. What other ranks
would really have given is not known, so sums, losses and gradients made of it mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Final

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]

_UNCHANGED: Final = ("AVG", "MIN", "MAX", "BAND", "BOR")
"""Reductions of equal values that give the value itself."""


def scale_of(op: Any, group_size: int) -> Any:
    """Returns what the reduction of one value by `group_size` ranks multiplies it by.

    Raises:
        NotImplementedError: The reduction is no such multiple.
    """
    if op == dist.ReduceOp.SUM:
        return group_size
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return group_size * factor
    if any(op == getattr(dist.ReduceOp, name) for name in _UNCHANGED):
        return 1
    raise NotImplementedError(f"Expected a sum, average, minimum or maximum, got {op}.")


def fill(
    kind: str,
    inputs: Tensors,
    outputs: Tensors,
    *,
    group_size: int,
    rank: int,
    scale: Any = 1,
) -> None:
    """Writes the outputs of one collective.

    No version counter moves, as when a library of communication writes them.

    Args:
        kind: Name of the operation, as the records call it.
        inputs: What this rank gives.
        outputs: What this rank gets; of calls in place, the inputs again.
        group_size: Ranks of the group.
        rank: This rank's number in the group.
        scale: What a reduction multiplies by.

    Raises:
        NotImplementedError: Nothing that this rank has could stand for the output.
        ValueError: The tensors do not fit each other.
    """
    write = _WRITERS.get(kind)
    if write is None:
        raise NotImplementedError(f"Expected an operation that needs no peer, got {kind}.")
    written = [tensor.data for tensor in outputs]
    with torch.no_grad():
        write([tensor.data for tensor in inputs], written, group_size, rank, scale)


def repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target` with the elements of `source`, over and over; with zeros if it has none."""
    if source.dtype != target.dtype:
        raise ValueError(f"Expected {source.dtype} in an output, got {target.dtype}.")
    length, flat = source.numel(), target.view(-1)
    if not length:
        target.zero_()
        return
    start = _place_in(source, flat)
    if start is not None:
        # In place: this part is there, and what is read may not be written.
        repeat(source, flat[:start])
        repeat(source, flat[start + length :])
        return
    times, rest = divmod(flat.numel(), length)
    whole = times * length
    if times:
        flat[:whole].view(times, length).copy_(source.reshape(1, length))
    if rest:
        flat[whole:].copy_(source.reshape(-1)[:rest])


def _place_in(source: torch.Tensor, flat: torch.Tensor) -> int | None:
    """Returns at which element of `flat` the source lies, or None."""
    start, rest = divmod(source.data_ptr() - flat.data_ptr(), flat.element_size())
    is_inside = not rest and 0 <= start and start + source.numel() <= flat.numel()
    return start if is_inside and source.device == flat.device else None


def _gather(inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any) -> None:
    given = sum(tensor.numel() for tensor in inputs)
    got = sum(tensor.numel() for tensor in outputs)
    if outputs and got != group_size * given:
        raise ValueError(f"Expected room for {group_size} times {given} elements, got {got}.")
    _exchange(inputs, outputs, group_size, rank, scale)


def _exchange(inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any) -> None:
    # Several ranks' parts of one input lie rank by rank, so inputs come round again.
    for target, source in zip(outputs, cycle(inputs), strict=False):
        repeat(source, target)


def _reduce_scatter(
    inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any
) -> None:
    if len(inputs) == len(outputs):
        parts = [_part(tensor, group_size, rank) for tensor in inputs]
    else:
        parts = list(inputs[rank::group_size])
    for source, target in zip(parts, outputs, strict=True):
        if source.numel() != target.numel():
            raise ValueError(
                f"Expected an output of {source.numel()} elements, got {target.numel()}."
            )
        _scaled(source.reshape(target.shape), target, scale)


def _part(tensor: torch.Tensor, group_size: int, rank: int) -> torch.Tensor:
    if tensor.numel() % group_size:
        raise ValueError(f"Expected {group_size} equal parts of {tensor.numel()} elements.")
    return tensor.reshape(group_size, -1)[rank]


def _all_reduce(inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any) -> None:
    for source, target in zip(inputs, outputs, strict=True):
        _scaled(source, target, scale)


def _scaled(source: torch.Tensor, target: torch.Tensor, scale: Any) -> None:
    # A sum of flags is whether any is set.
    if source.dtype == torch.bool or (not isinstance(scale, torch.Tensor) and scale == 1):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    else:
        torch.mul(source, scale, out=target)


def _scatter(inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any) -> None:
    if len(inputs) != group_size:
        raise NotImplementedError("Expected a scatter from this rank, got one from a peer.")
    repeat(inputs[rank], outputs[0])


def _nothing(inputs: Tensors, outputs: Tensors, group_size: int, rank: int, scale: Any) -> None:
    """A broadcast leaves what is there, and a barrier has nothing."""


_WRITERS: Final[dict[str, Callable[[Tensors, Tensors, int, int, Any], None]]] = {
    "all_gather": _gather,
    "gather": _gather,
    "all_to_all": _exchange,
    "all_to_all_single": _exchange,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "broadcast": _nothing,
    "scatter": _scatter,
    "barrier": _nothing,
}
