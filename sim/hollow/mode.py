"""The dispatch mode that computes what can be known from shapes and leaves values alone.

[Note: what stays real] A tensor is hollow when it is big or comes from a hollow one. Small tensors
made from small ones keep their values, and so do whole-number and boolean ones of up to a few
million elements: routing maps, token counts, splits, indices. A router's scores are hollow; its
`topk` chooses experts by `Routing` instead, and from there on everything is real again. New tensors
of one value (zeros, ones) are real whatever their type, since routing maps are scattered into them.

Hollow tensors own memory that nobody touches, which costs address space only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sim.hollow.mark import is_hollow, mark_hollow
from sim.hollow.routing import Routing

REAL_ELEMENTS: Final = 1 << 20
"""Largest number of elements that whole numbers, booleans and constants may have and be real."""

REAL_FLOATS: Final = 1 << 12
"""The same for other floating-point tensors."""

_ALWAYS_REAL: Final = frozenset(
    {"_unsafe_view", "detach", "lift_fresh", "set_", "resize_", "alias", "_reshape_alias"}
)
_CONSTANTS: Final = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
     "new_full", "arange", "scalar_tensor"}
)  # fmt: skip
_EMPTIES: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)


class _Operator(NamedTuple):
    """What is known of an operator from its schema.

    Attributes:
        name: Without namespace and overload.
        is_view: Whether its outputs share storage with its inputs and nothing is written.
        written: Positions of arguments that it writes.
        written_names: Names of the same arguments.
        returned: For each output, the position of the argument that it is, or None for a new one.
    """

    name: str
    is_view: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    returned: tuple[int | None, ...]
    argument_names: tuple[str, ...]


class _Meta(NamedTuple):
    """Size, stride and type of a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_operators: dict[Any, _Operator] = {}


def _operator(function: Any) -> _Operator:
    known = _operators.get(function)
    if known is None:
        schema = function._schema
        arguments = schema.arguments
        written = tuple(
            i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        returned: list[int | None] = []
        for result in schema.returns:
            alias = result.alias_info
            same = [
                i
                for i in written
                if alias is not None and arguments[i].alias_info.before_set == alias.before_set
            ]
            returned.append(same[0] if same else None)
        has_alias = any(r.alias_info is not None for r in schema.returns)
        name = schema.name.partition("::")[2]
        known = _operators[function] = _Operator(
            name=name,
            is_view=name in _ALWAYS_REAL or (has_alias and not written),
            written=written,
            written_names=tuple(arguments[i].name for i in written),
            returned=tuple(returned),
            argument_names=tuple(a.name for a in arguments),
        )
    return known


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class HollowMode(TorchDispatchMode):
    """Answers operators on hollow tensors with new hollow tensors of the right shape.

    Args:
        routing: Chooses experts.
        real_floats: Largest number of elements of a real floating-point tensor.
    """

    def __init__(self, routing: Routing, *, real_floats: int = REAL_FLOATS) -> None:
        super().__init__()
        self._routing = routing
        self._real_floats = real_floats
        self._shapes: dict[Any, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not guard each call against its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its parts come back here
        kwargs = kwargs or {}
        operator = _operator(func)
        if operator.is_view:
            return func(*args, **kwargs)
        if operator.name in _EMPTIES:
            return self._marked(func(*args, **kwargs), self._is_small)
        tensors = list(_tensors((*args, *kwargs.values())))
        if any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if operator.name in _CONSTANTS:
            return self._constant(func, args, kwargs)
        if not any(is_hollow(tensor) for tensor in tensors):
            return self._from_real(func, operator, args, kwargs, tensors)
        return self._from_hollow(func, operator, args, kwargs)

    # -- real inputs ------------------------------------------------------------------------

    def _is_small(self, tensor: torch.Tensor) -> bool:
        limit = self._real_floats if tensor.is_floating_point() else REAL_ELEMENTS
        return tensor.numel() <= limit

    def _constant(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        metas = self._metas(func, args, kwargs)
        if _numel(metas) <= REAL_ELEMENTS:
            return func(*args, **kwargs)
        return _hollow(metas)

    def _from_real(
        self,
        func: Any,
        operator: _Operator,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        if any(tensor.numel() > REAL_ELEMENTS for tensor in tensors):
            return self._from_hollow(func, operator, args, kwargs)
        return self._marked(func(*args, **kwargs), self._is_small)

    def _marked(self, result: Any, is_real: Callable[[torch.Tensor], bool]) -> Any:
        for tensor in _tensors([result]):
            if not is_real(tensor):
                mark_hollow(tensor)
        return result

    # -- hollow inputs ----------------------------------------------------------------------

    def _from_hollow(
        self, func: Any, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if operator.written:
            return self._written(operator, args, kwargs)
        if operator.name == "_local_scalar_dense":
            return {torch.bool: False}.get(args[0].dtype, 0.0 if args[0].is_floating_point() else 0)
        if operator.name == "masked_select":
            return _hollow(_Meta((int(args[1].sum()),), (1,), args[0].dtype))
        metas = self._metas(func, args, kwargs)
        if operator.name == "topk":
            values, indices = metas
            chosen = self._routing.choose(args[0].shape[0], args[0].shape[1], indices.size[1])
            return (_hollow(values), chosen)
        return _hollow(metas)

    def _written(self, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Leaves the values of what would be written as they are, and says they mean nothing."""
        named = dict(zip(operator.argument_names, args, strict=False)) | kwargs
        for name in operator.written_names:
            for tensor in _tensors([named.get(name)]):
                mark_hollow(tensor)
        results = tuple(
            None if i is None else named[operator.argument_names[i]] for i in operator.returned
        )
        if not results:
            return None
        return results[0] if len(results) == 1 else results

    # -- shapes -----------------------------------------------------------------------------

    def _metas(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        key = (func, _key(args), _key(kwargs.items()))
        known = self._shapes.get(key)
        if known is None:
            named = {k: _on_meta(v) for k, v in kwargs.items()}
            takes_device = "device" in _operator(func).argument_names
            if takes_device and not any(True for _ in _tensors(args)):
                named["device"] = torch.device("meta")
            elif named.get("device") is not None:
                named["device"] = torch.device("meta")
            result = func(*(_on_meta(v) for v in args), **named)
            known = self._shapes[key] = _describe(result)
        return known


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "dict_items":
        return tuple(_key(item) for item in value)
    return (type(value), value)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            tuple(value.shape), value.stride(), dtype=value.dtype, device="meta"
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    return value


def _describe(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _Meta(tuple(result.shape), tuple(result.stride()), result.dtype)
    if isinstance(result, (list, tuple)):
        return tuple(_describe(item) for item in result)
    return result


def _numel(metas: Any) -> int:
    if isinstance(metas, _Meta):
        count = 1
        for size in metas.size:
            count *= size
        return count
    return sum(_numel(item) for item in metas)


def _hollow(metas: Any) -> Any:
    if isinstance(metas, _Meta):
        tensor = torch.empty_strided(metas.size, metas.stride, dtype=metas.dtype, device="cpu")
        mark_hollow(tensor)
        return tensor
    if isinstance(metas, tuple):
        return tuple(_hollow(item) for item in metas)
    return metas
