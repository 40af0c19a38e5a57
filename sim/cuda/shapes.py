"""Kernels with shapes, as a GPU would launch them: several operators of a stand-in can be one.

A stand-in computes in many small operators what a GPU does in one kernel. It says so with `kernel`:
inside the block nothing is recorded, and at its end one kernel is, with what it reads and writes.
Where nothing records shapes the block changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sim.cuda.device import FakeDevice
from sim.cuda.kernels import KernelRecorder
from sim.cuda.kernels import _Signature as Signature  # its own subclass

Tensors = Sequence[torch.Tensor | None]


class _Active(threading.local):
    recorder: ShapeRecorder | None = None


_active = _Active()


class ShapeRecorder(KernelRecorder):
    """Records kernels with the shapes of what they read and write.

    Args:
        device: The rank's fake device.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device, records_shapes=True)
        self._depth = 0

    def __enter__(self) -> Any:
        _active.recorder = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        _active.recorder = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self._depth:
            return func(*args, **kwargs) if kwargs else func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self) -> None:
        """Records nothing until the matching `end`."""
        self._depth += 1

    def end(self, launch: Launch) -> None:
        """Records the kernels of a block, unless the block is inside another one."""
        self._depth -= 1
        if self._depth:
            return
        reads, updates, writes = (
            [tensor for tensor in tensors if tensor is not None]
            for tensors in (launch.reads, launch.updates, launch.writes)
        )
        for name in launch.names or ("",):
            self._record(_signature(name), reads, updates, writes)


class Launch:
    """What the kernels of a block read and write.

    Attributes:
        names: The kernels in order; empty for a block that launches nothing.
        reads: Tensors that are only read.
        updates: Tensors from before the block that are written.
        writes: New tensors; the block sets them.
    """

    def __init__(self, names: Sequence[str], reads: Tensors, updates: Tensors) -> None:
        self.names = names
        self.reads = reads
        self.updates = updates
        self.writes: Tensors = ()


def _signature(name: str) -> Signature:
    return Signature(
        name=name,
        read=(),
        written=(),
        read_names=frozenset(),
        written_names=frozenset(),
        makes_output=True,
        is_view=False,
        allocates_only=not name,
        is_host_read=False,
    )


@contextmanager
def kernel(*names: str, reads: Tensors = (), updates: Tensors = ()) -> Iterator[Launch]:
    """Says that the operators in the block are the named kernels on a GPU, in this order.

    Each of them counts as reading and writing everything. Without a name the block launches
    nothing; new tensors are allocated all the same.
    """
    recorder = _active.recorder
    launch = Launch(names, reads, updates)
    if recorder is None:
        yield launch
        return
    recorder.begin()
    try:
        yield launch
    finally:
        recorder.end(launch)
