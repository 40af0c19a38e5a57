"""What each collective computes, as functions of all ranks' inputs.

The same functions serve both worlds. Sums run in rank order; sums of 16-bit floats run in float32
and are rounded once, so the result does not depend on the order in which ranks arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp


@dataclass(kw_only=True)
class Call:
    """One rank's part in a collective.

    Attributes:
        kind: Name of the collective.
        inputs: Tensors that this rank gives.
        outputs: Tensors that this rank gets, written in place.
        reduce_op: Name of the reduction, or None.
        root: Group rank of the source or destination, or None.
        in_splits: Rows to each rank (all-to-all), or None for equal parts.
        out_splits: Rows from each rank (all-to-all), or None for equal parts.
    """

    kind: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    reduce_op: str | None = None
    root: int | None = None
    in_splits: list[int] | None = None
    out_splits: list[int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank gives, or gets where it gives nothing."""
        return sum(t.nbytes for t in (self.inputs or self.outputs))

    @property
    def dtype(self) -> str:
        """Element type of the first tensor."""
        tensors = self.inputs or self.outputs
        return str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"

    def signature(self) -> dict[str, Any]:
        """Returns what has to be equal on all ranks of the group."""
        result: dict[str, Any] = {"operation": self.kind}
        if self.kind == "barrier":
            return result
        result["dtype"] = self.dtype
        if self.reduce_op is not None:
            result["reduce op"] = self.reduce_op
        if self.root is not None:
            result["root"] = self.root
        if self.kind in _SAME_INPUT_SIZES:
            result["numel"] = [t.numel() for t in self.inputs]
        return result


_SAME_INPUT_SIZES: Final = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather"}
)


def check_all_to_all(calls: Sequence[Call]) -> str | None:
    """Returns what is wrong with the split sizes of an all-to-all, or None."""
    for source, sender in enumerate(calls):
        for target, receiver in enumerate(calls):
            sent = _splits(sender.in_splits, sender.inputs[0], len(calls))[target]
            expected = _splits(receiver.out_splits, receiver.outputs[0], len(calls))[source]
            if sent != expected:
                return (
                    f"group rank {source} sends {sent} rows to group rank {target}, "
                    f"which expects {expected}"
                )
    return None


def complete(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Writes the outputs of some ranks.

    Args:
        calls: The parts of all ranks, in group order. Outputs of other ranks are not touched.
        ranks: Group ranks whose outputs are written.
    """
    with torch.no_grad():
        if calls[0].kind == "all_reduce":
            # Input and output are one tensor: reduce before the first write.
            _all_reduce(calls, ranks)
            return
        for rank in ranks:
            _COMPLETE[calls[rank].kind](calls, rank)


def _splits(splits: list[int] | None, tensor: torch.Tensor, num_ranks: int) -> list[int]:
    if splits:
        return splits
    rows = tensor.shape[0] if tensor.dim() else 1
    return [rows // num_ranks] * num_ranks


def _reduce(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tensors[0].detach().to(wide, copy=True)
    for tensor in tensors[1:]:
        _REDUCE[op](total, tensor.detach().to(wide))
    if op == "AVG":
        total /= len(tensors)
    return total.to(dtype)


_REDUCE: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "SUM": lambda total, t: total.add_(t),
    "AVG": lambda total, t: total.add_(t),
    "PRODUCT": lambda total, t: total.mul_(t),
    "MIN": lambda total, t: total.copy_(torch.minimum(total, t)),
    "MAX": lambda total, t: total.copy_(torch.maximum(total, t)),
    "BAND": lambda total, t: total.bitwise_and_(t),
    "BOR": lambda total, t: total.bitwise_or_(t),
    "BXOR": lambda total, t: total.bitwise_xor_(t),
}


def _all_gather(calls: Sequence[Call], rank: int) -> None:
    outputs = calls[rank].outputs
    for i in range(len(calls[rank].inputs)):
        parts = [call.inputs[i].detach() for call in calls]
        per_input = len(outputs) // len(calls[rank].inputs)
        mine = outputs[i * per_input : (i + 1) * per_input]
        if per_input == 1:
            flat = mine[0].detach().view(-1)
            torch.cat([part.reshape(-1) for part in parts], out=flat)
        else:
            for output, part in zip(mine, parts, strict=True):
                output.detach().copy_(part.view_as(output))


def _reduce_scatter(calls: Sequence[Call], rank: int) -> None:
    outputs = calls[rank].outputs
    per_output = len(calls[rank].inputs) // len(outputs)
    op = calls[rank].reduce_op or "SUM"
    for i, output in enumerate(outputs):
        if per_output == 1:
            size = output.numel()
            parts = [c.inputs[i].reshape(-1)[rank * size : (rank + 1) * size] for c in calls]
        else:
            parts = [c.inputs[i * per_output + rank].reshape(-1) for c in calls]
        output.detach().copy_(_reduce(parts, op).view_as(output))


def _all_reduce(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    op = calls[0].reduce_op or "SUM"
    for i in range(len(calls[0].inputs)):
        total = _reduce([call.inputs[i] for call in calls], op)
        for rank in ranks:
            output = calls[rank].outputs[i]
            output.detach().copy_(total.view_as(output))


def _reduce_to_root(calls: Sequence[Call], rank: int) -> None:
    if rank == calls[rank].root:
        _all_reduce(calls, [rank])


def _all_to_all_single(calls: Sequence[Call], rank: int) -> None:
    output = calls[rank].outputs[0].detach()
    wanted = _splits(calls[rank].out_splits, output, len(calls))
    start = 0
    for source, call in enumerate(calls):
        splits = _splits(call.in_splits, call.inputs[0], len(calls))
        first = sum(splits[:rank])
        part = call.inputs[0].detach()[first : first + splits[rank]]
        output[start : start + wanted[source]].copy_(part.view_as(output[start : start + wanted[source]]))
        start += wanted[source]


def _all_to_all(calls: Sequence[Call], rank: int) -> None:
    for output, call in zip(calls[rank].outputs, calls, strict=True):
        output.detach().copy_(call.inputs[rank].detach().view_as(output))


def _broadcast(calls: Sequence[Call], rank: int) -> None:
    root = calls[rank].root or 0
    if rank != root:
        for output, source in zip(calls[rank].outputs, calls[root].inputs, strict=True):
            output.detach().copy_(source.detach().view_as(output))


def _scatter(calls: Sequence[Call], rank: int) -> None:
    root = calls[rank].root or 0
    output = calls[rank].outputs[0]
    output.detach().copy_(calls[root].inputs[rank].detach().view_as(output))


def _gather(calls: Sequence[Call], rank: int) -> None:
    if rank == calls[rank].root:
        for output, call in zip(calls[rank].outputs, calls, strict=True):
            output.detach().copy_(call.inputs[0].detach().view_as(output))


def _barrier(calls: Sequence[Call], rank: int) -> None:
    """A barrier moves no data."""


_COMPLETE: Final[dict[str, Callable[[Sequence[Call], int], None]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce_to_root,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "barrier": _barrier,
}
