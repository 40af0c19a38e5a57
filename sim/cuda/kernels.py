"""Sees every kernel that a rank launches: which storages it reads and writes, on which stream.

Views and metadata changes launch nothing and are left out. A storage is allocated where it is first
seen as an output, on the stream that is current there, and freed where its last tensor dies.

[Note: the cost of seeing kernels]
A run launches tens of thousands of small kernels, so what is done for each is kept short: an
operator's schema is read once, only arguments that can hold tensors are looked at, and a storage
carries its own number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from real.trace import OpKind
from sim.cuda.device import FakeDevice

_ALLOCATES_ONLY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)

DTYPE_NAMES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}
"""Short names of element types in `shapes` of a kernel record; the digits are bits."""


class _Signature(NamedTuple):
    """What an operator does to its arguments.

    Attributes:
        name: Its name without namespace and overload.
        read: Positions of the arguments that may hold tensors and are only read.
        written: Positions of the arguments that it writes.
        read_names: Names of arguments as in `read`, for those that are passed by name.
        written_names: Names of arguments as in `written`.
        makes_output: Whether it returns memory that is none of its arguments'.
        is_view: Whether it launches nothing.
        allocates_only: Whether it makes memory and launches nothing.
        is_host_read: Whether the host looks at a value, so that it waits for the stream.
    """

    name: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    read_names: frozenset[str]
    written_names: frozenset[str]
    makes_output: bool
    is_view: bool
    allocates_only: bool
    is_host_read: bool


def _read_signature(function: Any) -> _Signature:
    schema = function._schema
    read, written = [], []
    read_names, written_names = set(), set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(position)
            written_names.add(argument.name)
        elif "Tensor" in str(argument.type):
            read.append(position)
            read_names.add(argument.name)
    aliases = [r.alias_info for r in schema.returns]
    name = schema.name.partition("::")[2]
    return _Signature(
        name=name,
        read=tuple(read),
        written=tuple(written),
        read_names=frozenset(read_names),
        written_names=frozenset(written_names),
        makes_output=any(alias is None for alias in aliases),
        is_view=bool(aliases)
        and not written
        and all(alias is not None and not alias.is_write for alias in aliases),
        allocates_only=name in _ALLOCATES_ONLY,
        is_host_read=name == "_local_scalar_dense",
    )


class KernelRecorder(TorchDispatchMode):
    """Records kernels, allocations and frees of one rank.

    Args:
        device: The rank's fake device.
        records_shapes: Also record the shape of each tensor that a kernel reads or writes.
    """

    _signatures: Final[dict[Any, _Signature]] = {}

    def __init__(self, device: FakeDevice, *, records_shapes: bool = False) -> None:
        super().__init__()
        self._device = device
        self._records_shapes = records_shapes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not guard each call against its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if args and is_on_host(args[0]):
            result = func(*args, **kwargs) if kwargs else func(*args)
            if isinstance(result, torch.Tensor):
                mark_on_host(result)
            return result
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _read_signature(func)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError:
            # It has asked for its inputs all the same: a check can say what was wrong with them.
            asked_for: list[torch.Tensor] = []
            _collect([*args, *(kwargs or {}).values()], asked_for)
            self._record(signature, asked_for, [], [])
            raise
        if signature.is_view:
            return result
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        num_args = len(args)
        for position in signature.read:
            if position < num_args:
                _collect(args[position], reads)
        for position in signature.written:
            if position < num_args:
                _collect(args[position], writes)
        if kwargs:
            for name, value in kwargs.items():
                if name in signature.written_names:
                    _collect(value, writes)
                elif name in signature.read_names:
                    _collect(value, reads)
        outputs: list[torch.Tensor] = []
        if signature.makes_output:
            _collect(result, outputs)
        self._record(signature, reads, writes, outputs)
        return result

    def _record(
        self,
        signature: _Signature,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        device = self._device
        recorder = device.recorder
        stream = device.current_stream().stream_id
        # Dictionaries stand for sets that keep their order.
        read_ids = {device.storage_id(t.untyped_storage()): None for t in reads}
        write_ids = {device.storage_id(t.untyped_storage()): None for t in writes}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if not device.has_numbered(storage):
                recorder.record(
                    OpKind.ALLOCATE,
                    stream=stream,
                    storage=device.number_until_freed(storage),
                    bytes=storage.nbytes(),
                )
            number = device.storage_id(storage)
            if number not in read_ids:
                write_ids[number] = None
        if signature.is_host_read:
            recorder.record(OpKind.HOST_SYNC, what="stream", on=stream)
        if signature.allocates_only or not (read_ids or write_ids):
            return
        fields: dict[str, Any] = {}
        if self._records_shapes:
            fields["shapes"] = [
                [DTYPE_NAMES.get(t.dtype, str(t.dtype)), *t.shape]
                for t in (*reads, *writes, *outputs)
            ]
            if torch._C._current_autograd_node() is not None:
                fields["backward"] = True
        recorder.record(
            OpKind.KERNEL,
            stream=stream,
            name=signature.name,
            reads=list(read_ids),
            writes=list(write_ids),
            **fields,
        )


def mark_on_host(tensor: torch.Tensor) -> None:
    """Says that a tensor is in host memory on a GPU machine too, such as a host random state."""
    tensor.untyped_storage().is_host = True  # type: ignore[attr-defined]


def is_on_host(value: object) -> bool:
    """Whether a value is a tensor in host memory: what is done with it launches no kernel."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return getattr(value.untyped_storage(), "is_host", False)


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value._local_tensor if isinstance(value, DTensor) else value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, into)
