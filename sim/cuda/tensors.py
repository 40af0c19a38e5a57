"""Tensor and storage names: device arguments become CPU, storage changes become records.

[Note: emptied storage]
On a GPU a storage of size 0 has given its memory back, and a kernel that reads it all the same
reads what others have written there. On a CPU it would read address 0 and end the interpreter. So a
storage that is emptied keeps its memory and its address, filled with bytes that are NaN in every
floating type; its size is 0 for whoever asks, and the record of the kernel names it, for I1.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from real.trace import OpKind
from sim.cuda.device import active_device
from sim.cuda.streams import Stream

_CPU: Final = torch.device("cpu")
_EMPTIED: Final = "_fake_cuda_emptied"
_NO_VALUE: Final = 0xFF
_resize_storage = torch.UntypedStorage.resize_
_storage_nbytes = torch.UntypedStorage.nbytes
_tensor_to = torch.Tensor.to
_tensor_type = torch.Tensor.type

FACTORIES: Final = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
"""Functions of torch that take `device=`."""

NEW_METHODS: Final = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Methods of torch.Tensor that take `device=`."""


def on_cpu(device: Any) -> Any:
    """Returns the CPU for anything that names a CUDA device, and other values unchanged."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with its `device=` argument taken to the CPU."""

    @functools.wraps(function)
    def on_fake_device(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return on_fake_device


class Generator(torch.Generator):
    """A random generator; one for a CUDA device lives on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:  # noqa: D102 - as torch.Generator
        return super().__new__(cls, on_cpu(device))  # type: ignore[call-arg]


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Moves or casts; a CUDA target is the CPU."""
    if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
        args = (on_cpu(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    return _tensor_to(self, *args, **kwargs)


def cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Returns the tensor itself: its memory already stands for device memory."""
    return self


def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Returns the name of the tensor's type, as of a CUDA tensor; or casts, when given a type."""
    if dtype is None:
        return str(_tensor_type(self)).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return _tensor_type(self, dtype, *args, **kwargs)


def record_stream(self: torch.Tensor, s: Stream) -> None:
    """Tells the allocator that `s` uses this tensor."""
    device = active_device()
    storage = device.storage_id(self.untyped_storage())
    device.recorder.record(OpKind.RECORD_STREAM, stream=s.stream_id, storage=storage)


def resize_(self: torch.UntypedStorage, size: int) -> Any:
    """Resizes a storage, in bytes: 0 gives the memory back and keeps the storage.

    [Note: emptied storage]
    """
    device = active_device()
    device.recorder.record(
        OpKind.RESIZE,
        stream=device.current_stream().stream_id,
        storage=device.storage_id(self),
        bytes=int(size),
        was=nbytes(self),
    )
    held = _storage_nbytes(self)
    is_hollow = getattr(self, "is_hollow", False)  # nobody reads its values: the memory may go
    if size == 0 and held and not is_hollow:
        self.__dict__[_EMPTIED] = True
        ctypes.memset(self.data_ptr(), _NO_VALUE, held)
        return self
    self.__dict__.pop(_EMPTIED, None)
    return self if size == held else _resize_storage(self, size)


def nbytes(self: torch.UntypedStorage) -> int:
    """Returns the size of a storage in bytes, 0 when it has been emptied."""
    return 0 if _EMPTIED in self.__dict__ else _storage_nbytes(self)


@property  # type: ignore[misc]
def is_cuda(self: torch.Tensor) -> bool:
    """True: code under test takes the path that it takes on a GPU."""
    return True
