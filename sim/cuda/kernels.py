"""Sees every kernel that a rank launches: which storages it reads and writes, on which stream.

Views and metadata changes launch nothing and are left out. A storage is allocated where it is first
seen as an output, on the stream that is current there, and freed where its last tensor dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from real.trace import OpKind
from sim.cuda.device import FakeDevice

_ALLOCATES_ONLY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)


class _Signature(NamedTuple):
    """What an operator does to its arguments.

    Attributes:
        name: Its name without namespace and overload.
        written: Positions and names of arguments that it writes.
        is_view: Whether it launches nothing.
    """

    name: str
    written: frozenset[int | str]
    is_view: bool


_signatures: dict[Any, _Signature] = {}


def _signature(function: Any) -> _Signature:
    known = _signatures.get(function)
    if known is None:
        schema = function._schema
        written: set[int | str] = set()
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.update((position, argument.name))
        returns_alias = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        known = _Signature(
            name=schema.name.partition("::")[2],
            written=frozenset(written),
            is_view=returns_alias and not written,
        )
        _signatures[function] = known
    return known


class KernelRecorder(TorchDispatchMode):
    """Records kernels, allocations and frees of one rank.

    Args:
        device: The rank's fake device.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            # It has asked for its inputs all the same: a check can say what was wrong with them.
            reads, writes = self._arguments(signature, args, kwargs)
            self._record(signature.name, reads, writes)
            raise
        if signature.is_view:
            return result
        reads, writes = self._arguments(signature, args, kwargs)
        inputs = set(reads)
        for storage in _storages(result):
            number = self._id(storage, is_output=True)
            if number not in inputs and number not in writes:
                writes.append(number)
        if signature.name == "_local_scalar_dense":
            # A value that the host looks at: on a GPU it waits for the stream.
            stream = self._device.current_stream().stream_id
            self._device.recorder.record(OpKind.HOST_SYNC, what="stream", on=stream)
        if signature.name not in _ALLOCATES_ONLY and (reads or writes):
            self._record(signature.name, reads, writes)
        return result

    def _arguments(
        self, signature: _Signature, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Returns the storages of arguments that are read, and of those that are written."""
        reads: list[int] = []
        writes: list[int] = []
        for key, value in (*enumerate(args), *kwargs.items()):
            target = writes if key in signature.written else reads
            for storage in _storages(value):
                target.append(self._id(storage, is_output=False))
        return reads, writes

    def _record(self, name: str, reads: list[int], writes: list[int]) -> None:
        self._device.recorder.record(
            OpKind.KERNEL,
            stream=self._device.current_stream().stream_id,
            name=name,
            reads=list(dict.fromkeys(reads)),
            writes=list(dict.fromkeys(writes)),
        )

    def _id(self, storage: torch.UntypedStorage, *, is_output: bool) -> int:
        number = self._device.storage_id(storage)
        if number not in self._seen:
            self._seen.add(number)
            if not is_output:
                return number  # from before this mode, or made without a kernel
            recorder = self._device.recorder
            recorder.record(
                OpKind.ALLOCATE,
                stream=self._device.current_stream().stream_id,
                storage=number,
                bytes=storage.nbytes(),
            )
            weakref.finalize(storage, _freed, recorder, number).atexit = False
        return number


def _freed(recorder: Any, number: int) -> None:
    recorder.record(OpKind.FREE, storage=number)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            value = value._local_tensor
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
