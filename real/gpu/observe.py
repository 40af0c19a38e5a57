"""Records what a rank does with its GPU, by the names of torch that the simulated runtime has too.

One table of swaps puts a thin wrapper before each name, for the length of a block. A wrapper writes
the same record that the simulated runtime writes for the same call, then calls what stood there.
Nothing else changes: not the order of calls, not their arguments, not what they return.

[Note: one call, one record]
Some names call others of the table: `Stream.wait_stream` records an event and waits for it. The
simulated runtime has one record for it. While a wrapped name runs, the wrappers below it are
silent. The same holds where torch itself comes back to the wrapper: with a function mode around,
its methods of C++ look their own name up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from real.gpu import communication
from real.gpu.recorder import GpuRecorder, speaking
from real.trace import OpKind, recording

_MISSING: Final = object()

Wrapper = Callable[[Any], Callable[..., Any]]


def _wait_stream(original: Any) -> Callable[..., Any]:
    def wait_stream(self: Any, stream: Any) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, stream)
        on = recorder.stream_number(stream.stream_id)
        recorder.record(OpKind.STREAM_WAIT, stream=self.stream_id, on=on)
        return recorder.unheard(original, self, stream)

    return wait_stream


def _stream_synchronize(original: Any) -> Callable[..., Any]:
    def synchronize(self: Any) -> Any:
        recorder = speaking()
        if recorder is not None:
            on = recorder.stream_number(self.stream_id)
            recorder.record(OpKind.HOST_SYNC, what="stream", on=on)
        return original(self)

    return synchronize


def _event_record(original: Any) -> Callable[..., Any]:
    def record(self: Any, stream: Any = None) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, stream)
        stream = torch.cuda.current_stream() if stream is None else stream
        recorder.event_record(self, stream.stream_id)
        return recorder.unheard(original, self, stream)

    return record


def _event_wait(original: Any) -> Callable[..., Any]:
    def wait(self: Any, stream: Any = None) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, stream)
        stream = torch.cuda.current_stream() if stream is None else stream
        mark = recorder.event_mark(self)
        recorder.record(
            OpKind.EVENT_WAIT, stream=stream.stream_id, event=mark.number, record=mark.newest
        )
        result = recorder.unheard(original, self, stream)
        if recorder.times is not None:
            recorder.times.waited(recorder, stream)
        return result

    return wait


def _wait_event(original: Any) -> Callable[..., Any]:
    def wait_event(self: Any, event: Any) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, event)
        mark = recorder.event_mark(event)
        recorder.record(
            OpKind.EVENT_WAIT, stream=self.stream_id, event=mark.number, record=mark.newest
        )
        result = recorder.unheard(original, self, event)
        if recorder.times is not None:
            recorder.times.waited(recorder, self)
        return result

    return wait_event


def _event_synchronize(original: Any) -> Callable[..., Any]:
    def synchronize(self: Any) -> Any:
        recorder = speaking()
        if recorder is not None:
            newest = recorder.event_mark(self).newest
            recorder.record(OpKind.HOST_SYNC, what="event", on=newest)
        return original(self)

    return synchronize


def _device_synchronize(original: Any) -> Callable[..., Any]:
    def synchronize(device: Any = None) -> Any:
        recorder = speaking()
        if recorder is not None:
            recorder.record(OpKind.HOST_SYNC, what="device", on=None)
        return original(device)

    return synchronize


def _record_stream(original: Any) -> Callable[..., Any]:
    def record_stream(self: Any, s: Any) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, s)
        storage = recorder.storage_number(self.untyped_storage())
        recorder.record(OpKind.RECORD_STREAM, stream=s.stream_id, storage=storage)
        return recorder.unheard(original, self, s)

    return record_stream


def _resize(original: Any) -> Callable[..., Any]:
    def resize_(self: Any, size: Any) -> Any:
        recorder = speaking()
        if recorder is not None:
            recorder.record(
                OpKind.RESIZE,
                stream=torch.cuda.current_stream().stream_id,
                storage=recorder.storage_number(self),
                bytes=int(size),
                was=self.nbytes(),
            )
        return original(self, size)

    return resize_


def _range_push(original: Any) -> Callable[..., Any]:
    def range_push(msg: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = speaking()
        if recorder is not None:
            recorder.record(OpKind.NVTX_PUSH, text=str(msg))
        return original(msg, *args, **kwargs)

    return range_push


def _range_pop(original: Any) -> Callable[..., Any]:
    def range_pop() -> Any:
        recorder = speaking()
        if recorder is not None:
            recorder.record(OpKind.NVTX_POP)
        return original()

    return range_pop


class Swap(NamedTuple):
    """One name to swap: what `wrap` makes of `owner.name` stands there instead."""

    owner: Any
    name: str
    wrap: Wrapper


def swap_table(process_group: type | None = None) -> list[Swap]:
    """Returns every name that is wrapped, in order.

    Args:
        process_group: The class whose methods are the collectives; None for that of this world.
    """
    nvtx: Any = torch.cuda.nvtx
    process_group = process_group or _class_of_groups()
    # A class of Python has handles of its own, whose methods hide those of torch's class.
    work_class = getattr(process_group, "work_class", dist.Work)
    table = [
        Swap(torch.cuda.Stream, "wait_stream", _wait_stream),
        Swap(torch.cuda.Stream, "wait_event", _wait_event),
        Swap(torch.cuda.Stream, "synchronize", _stream_synchronize),
        Swap(torch.cuda.Event, "record", _event_record),
        Swap(torch.cuda.Event, "wait", _event_wait),
        Swap(torch.cuda.Event, "synchronize", _event_synchronize),
        Swap(torch.cuda, "synchronize", _device_synchronize),
        Swap(nvtx, "range_push", _range_push),
        Swap(nvtx, "range_pop", _range_pop),
        Swap(torch.Tensor, "record_stream", _record_stream),
        Swap(torch.UntypedStorage, "resize_", _resize),
        Swap(work_class, "wait", communication.work_wait),
    ]
    for name, wrap in communication.wrappers():
        if hasattr(process_group, name):  # the two ends of torch's range have different ones
            table.append(Swap(process_group, name, wrap))
    return table


def _class_of_groups() -> type:
    """Returns the class of this world's process groups, or torch's own where there is no world."""
    return type(dist.group.WORLD) if dist.is_initialized() else dist.ProcessGroup


@contextmanager
def observed(recorder: GpuRecorder, *, process_group: type | None = None) -> Iterator[GpuRecorder]:
    """Makes `recorder` the active one and swaps every name of the table for the block.

    Every name is restored after it, whatever happened inside.
    """
    with wrapped(process_group), recording(recorder):
        yield recorder


@contextmanager
def wrapped(process_group: type | None = None) -> Iterator[None]:
    """Swaps every name of the table for the block; a wrapper writes to the active recorder."""
    saved: list[tuple[Swap, Any]] = []
    try:
        for swap in swap_table(process_group):
            # What the owner itself has, not what it inherits: that is what has to come back.
            saved.append((swap, vars(swap.owner).get(swap.name, _MISSING)))
            setattr(swap.owner, swap.name, swap.wrap(getattr(swap.owner, swap.name)))
        yield
    finally:
        for swap, original in reversed(saved):
            if original is not _MISSING:
                setattr(swap.owner, swap.name, original)
            elif swap.name in vars(swap.owner):
                delattr(swap.owner, swap.name)
