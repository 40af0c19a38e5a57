"""What each collective computes: what every rank gives to every other, and what becomes of it.

The same functions serve both worlds. Sums run in rank order; sums of 16-bit floats run in float32
and are rounded once, so the result does not depend on the order in which ranks arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from sim.hollow import is_hollow

ReduceOp = dist.ReduceOp


@dataclass(kw_only=True)
class Call:
    """One rank's part in a collective.

    Attributes:
        kind: Name of the collective.
        inputs: Tensors that this rank gives.
        outputs: Tensors that this rank gets, written in place.
        reduce_op: Name of the reduction, or None.
        factor: What each input is multiplied by before a PREMUL_SUM, or None.
        root: Group rank of the source or destination, or None.
        in_splits: Rows to each rank (all_to_all_single), or None.
        out_splits: Rows from each rank (all_to_all_single), or None.
        unit: FSDP unit on whose behalf it is called, or None.
        blanked: Outputs that `blank_outputs` has cleared.
    """

    kind: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    reduce_op: str | None = None
    factor: float | None = None
    root: int | None = None
    in_splits: list[int] | None = None
    out_splits: list[int] | None = None
    unit: str | None = None
    blanked: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank gives, or gets where it gives nothing."""
        return sum(t.nbytes for t in (self.inputs or self.outputs))

    @property
    def dtype(self) -> str:
        """Element type of the first tensor."""
        tensors = self.inputs or self.outputs
        return str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"

    @property
    def is_uneven(self) -> bool:
        """Whether an all_gather into a list gets tensors of different sizes, one from each rank."""
        if self.kind != "all_gather" or len(self.inputs) != 1 or len(self.outputs) < 2:
            return False
        return len({tensor.numel() for tensor in self.outputs}) > 1

    def signature(self) -> dict[str, Any]:
        """Returns what has to be equal on all ranks of the group."""
        result: dict[str, Any] = {"operation": self.kind}
        if self.unit is not None:
            result["FSDP unit"] = self.unit
        if self.kind == "barrier":
            return result
        result["dtype"] = self.dtype
        if self.reduce_op is not None:
            result["reduce op"] = self.reduce_op
        if self.factor is not None:
            result["factor"] = self.factor
        if self.root is not None:
            result["root"] = self.root
        if self.is_uneven:
            result["numel by rank"] = [t.numel() for t in self.outputs]
        elif self.kind in _SAME_INPUT_SIZES:
            result["numel"] = [t.numel() for t in self.inputs]
        elif self.kind == "all_to_all_single":
            result["row size"] = self.inputs[0].shape[1:].numel()
        return result


_SAME_INPUT_SIZES: Final = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather"}
)


def check_layout(tensor: torch.Tensor, what: str) -> None:
    """Refuses a tensor that NCCL refuses.

    Raises:
        ValueError: It is not contiguous.
    """
    if not tensor.is_contiguous(memory_format=_memory_format(tensor)):
        raise ValueError(
            f"Expected a contiguous tensor in {what}, as NCCL does, got one of shape "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}."
        )


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Returns the format whose strides the tensor has, among those that NCCL takes."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def check_layouts(call: Call) -> None:
    """Refuses a call that NCCL refuses for how its tensors lie in memory.

    Raises:
        ValueError: A tensor is not contiguous.
    """
    for tensor in (*call.inputs, *call.outputs):
        check_layout(tensor, f"a call of {call.kind}")


def check_sizes(call: Call, num_ranks: int) -> None:
    """Checks what one rank can check alone: that its outputs have room for its inputs.

    Raises:
        ValueError: Sizes or splits do not fit the number of ranks.
    """
    given = sum(tensor.numel() for tensor in call.inputs)
    taken = sum(tensor.numel() for tensor in call.outputs)
    if call.is_uneven:
        if len(call.outputs) != num_ranks:
            raise ValueError(
                f"Expected {num_ranks} outputs in an all_gather, got {len(call.outputs)}."
            )
    elif call.kind == "all_gather" and taken != given * num_ranks:
        raise ValueError(
            f"Expected outputs of {num_ranks} x {given} elements in an all_gather, got {taken}."
        )
    if call.kind == "reduce_scatter" and given != taken * num_ranks:
        raise ValueError(
            f"Expected inputs of {num_ranks} x {taken} elements in a reduce_scatter, got {given}."
        )
    if call.kind == "all_to_all_single":
        for name, splits, tensor in (
            ("input", call.in_splits, call.inputs[0]),
            ("output", call.out_splits, call.outputs[0]),
        ):
            if splits is None or len(splits) != num_ranks or sum(splits) != _num_rows(tensor):
                raise ValueError(
                    f"Expected {num_ranks} {name} splits of an all_to_all_single with a sum of "
                    f"{_num_rows(tensor)}, got {splits}."
                )


def even_splits(tensor: torch.Tensor, num_ranks: int) -> list[int]:
    """Returns the rows that each rank has of a tensor divided evenly."""
    return [_num_rows(tensor) // num_ranks] * num_ranks


def given_sizes(call: Call) -> list[int]:
    """Returns the size of what this rank gives to each rank: rows, or elements of whole tensors.

    Empty for kinds whose signature already fixes the sizes.
    """
    if call.kind == "all_to_all_single":
        return call.in_splits or []
    if call.is_uneven:
        return [call.inputs[0].numel()] * len(call.outputs)
    if call.kind in ("all_to_all", "scatter"):
        return [tensor.numel() for tensor in call.inputs]
    return []


def wanted_sizes(call: Call, num_ranks: int) -> list[int]:
    """Returns the size of what this rank expects from each rank, as `given_sizes` counts it."""
    if call.kind == "all_to_all_single":
        return call.out_splits or []
    if call.kind == "all_to_all" or call.is_uneven:
        return [tensor.numel() for tensor in call.outputs]
    if call.kind == "scatter":
        return [call.outputs[0].numel()] * num_ranks
    return []


def size_problem(call: Call, source: int, given: int, target: int, wanted: int) -> str | None:
    """Returns what is wrong between what rank `source` gives and `target` expects, or None."""
    if given == wanted:
        return None
    what = "rows" if call.kind == "all_to_all_single" else "elements"
    return f"rank {source} sends {given} {what} to rank {target}, which expects {wanted}"


def check_between_ranks(calls: Sequence[Call], ranks: Sequence[int]) -> str | None:
    """Returns what is wrong between any two ranks' sizes, or None.

    Args:
        calls: The parts of all ranks, in group order.
        ranks: Their global numbers, for the message.
    """
    given = [given_sizes(call) for call in calls]
    wanted = [wanted_sizes(call, len(calls)) for call in calls]
    for source, sizes in enumerate(given):
        for target, size in enumerate(sizes):
            problem = size_problem(
                calls[0], ranks[source], size, ranks[target], wanted[target][source]
            )
            if problem is not None:
                return problem
    return None


def parts(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    """Returns what group rank `rank` gives to group rank `target`, as views of its inputs."""
    return _PARTS[call.kind](call, rank, target)


def finish(call: Call, given: Sequence[Sequence[torch.Tensor]], rank: int) -> None:
    """Writes the outputs of one rank.

    Args:
        call: The rank's own part.
        given: What each rank gives to this one (`parts`), in group order.
        rank: The rank in the group.
    """
    with torch.no_grad():
        _FINISH[call.kind](call, given, rank)


def complete(calls: Sequence[Call]) -> None:
    """Writes the outputs of all ranks.

    Args:
        calls: The parts of all ranks, in group order.
    """
    if calls[0].kind == "all_reduce":
        # Input and output are one tensor: reduce before the first write, once for all.
        with torch.no_grad():
            totals = _totals(calls[0], [call.inputs for call in calls])
            for call in calls:
                _copy(call.outputs, totals)
        return
    everyone = range(len(calls))
    for target in everyone:
        finish(calls[target], [parts(calls[s], s, target) for s in everyone], target)


def blank_outputs(call: Call) -> None:
    """Clears the outputs of an asynchronous call: nobody may read them before the wait.

    Who does reads zeros, in every run. Outputs that share memory with an input keep it.
    """
    if any(map(is_hollow, call.inputs)):
        return  # nobody reads values in such a run
    inputs = {tensor.untyped_storage()._cdata for tensor in call.inputs}
    call.blanked = [t for t in call.outputs if t.untyped_storage()._cdata not in inputs]
    for tensor in call.blanked:
        tensor.detach().zero_()


def with_memory(call: Call) -> Call:
    """Returns a call whose tensors all have memory, for one that lost some while it was on its way.

    On a GPU such memory may hold anything; checks see the release in the trace.
    """
    if all(map(_has_memory, (*call.inputs, *call.outputs))):
        return call
    inputs, outputs = ([_scratch(t) for t in tensors] for tensors in (call.inputs, call.outputs))
    return replace(call, inputs=inputs, outputs=outputs, blanked=[])


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _scratch(tensor: torch.Tensor) -> torch.Tensor:
    if _has_memory(tensor):
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


# -- what a rank gives ------------------------------------------------------------------------


def _everything(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return call.inputs


def _nothing(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return []


def _everything_to_root(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return call.inputs if target == call.root else []


def _everything_from_root(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return call.inputs if rank == call.root != target else []


def _one_each_from_root(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return [call.inputs[target]] if rank == call.root else []


def _one_each(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    return [call.inputs[target]]


def _rows(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    splits = call.in_splits or [0]
    first = sum(splits[:target])
    return [call.inputs[0].detach()[first : first + splits[target]]]


def _slices(call: Call, rank: int, target: int) -> list[torch.Tensor]:
    per_output = len(call.inputs) // len(call.outputs)
    if per_output > 1:
        return [call.inputs[i + target] for i in range(0, len(call.inputs), per_output)]
    result = []
    for given, output in zip(call.inputs, call.outputs, strict=True):
        size = output.numel()
        result.append(given.detach().reshape(-1)[target * size : (target + 1) * size])
    return result


_PARTS: Final[dict[str, Callable[[Call, int, int], list[torch.Tensor]]]] = {
    "all_gather": _everything,
    "all_reduce": _everything,
    "all_to_all": _one_each,
    "all_to_all_single": _rows,
    "barrier": _nothing,
    "broadcast": _everything_from_root,
    "gather": _everything_to_root,
    "reduce": _everything_to_root,
    "reduce_scatter": _slices,
    "scatter": _one_each_from_root,
}

# -- what a rank makes of what it got ---------------------------------------------------------

_Given = Sequence[Sequence[torch.Tensor]]


def _copy(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.detach().copy_(value.detach().view_as(output))


def _reduce(call: Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    op = call.reduce_op or "SUM"
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    # Ranks agree on the number of elements; shapes are each rank's own affair.
    total = tensors[0].detach().reshape(-1).to(wide, copy=True)
    if call.factor is not None:
        total *= call.factor
    for tensor in tensors[1:]:
        given = tensor.detach().reshape(-1).to(wide)
        _REDUCE[op](total, given if call.factor is None else given * call.factor)
    if op == "AVG":
        # NCCL divides integers as C does.
        mode = None if dtype.is_floating_point or dtype.is_complex else "trunc"
        total = torch.div(total, len(tensors), rounding_mode=mode)
    return total.to(dtype)


_REDUCE: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "SUM": lambda total, t: total.add_(t),
    "AVG": lambda total, t: total.add_(t),
    "PREMUL_SUM": lambda total, t: total.add_(t),
    "PRODUCT": lambda total, t: total.mul_(t),
    "MIN": lambda total, t: total.copy_(torch.minimum(total, t)),
    "MAX": lambda total, t: total.copy_(torch.maximum(total, t)),
    "BAND": lambda total, t: total.bitwise_and_(t),
    "BOR": lambda total, t: total.bitwise_or_(t),
    "BXOR": lambda total, t: total.bitwise_xor_(t),
}


def _totals(call: Call, given: _Given) -> list[torch.Tensor]:
    return [_reduce(call, tensors) for tensors in zip(*given, strict=True)]


def _all_gather(call: Call, given: _Given, rank: int) -> None:
    per_input = len(call.outputs) // len(call.inputs)
    for i, tensors in enumerate(zip(*given, strict=True)):
        if per_input == 1:
            flat = call.outputs[i].detach().view(-1)
            values = [tensor.detach().reshape(-1) for tensor in tensors]
            if _shares_memory(call.inputs[i], flat):  # the gather in place of a parameter buffer
                flat.copy_(torch.cat(values))
            else:
                torch.cat(values, out=flat)
        else:
            _copy(call.outputs[i * per_input : (i + 1) * per_input], tensors)


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _take_totals(call: Call, given: _Given, rank: int) -> None:
    _copy(call.outputs, _totals(call, given))


def _reduce_at_root(call: Call, given: _Given, rank: int) -> None:
    if rank == call.root:
        _copy(call.outputs, _totals(call, given))


def _all_to_all_single(call: Call, given: _Given, rank: int) -> None:
    output = call.outputs[0].detach()
    start = 0
    for rows, [part] in zip(call.out_splits or [], given, strict=True):
        target = output[start : start + rows]
        target.copy_(part.view_as(target))
        start += rows


def _take_one_each(call: Call, given: _Given, rank: int) -> None:
    _copy(call.outputs, [tensor for [tensor] in given])


def _take_all_from_root(call: Call, given: _Given, rank: int) -> None:
    root = call.root or 0
    if given[root]:
        _copy(call.outputs, given[root])


def _gather(call: Call, given: _Given, rank: int) -> None:
    if rank == call.root:
        _copy(call.outputs, [tensor for [tensor] in given])


def _finish_nothing(call: Call, given: _Given, rank: int) -> None:
    """A barrier moves no data."""


_FINISH: Final[dict[str, Callable[[Call, _Given, int], None]]] = {
    "all_gather": _all_gather,
    "all_reduce": _take_totals,
    "all_to_all": _take_one_each,
    "all_to_all_single": _all_to_all_single,
    "barrier": _finish_nothing,
    "broadcast": _take_all_from_root,
    "gather": _gather,
    "reduce": _reduce_at_root,
    "reduce_scatter": _take_totals,
    "scatter": _take_all_from_root,
}
