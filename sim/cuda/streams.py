"""Streams and events with torch.cuda's own names and signatures.

Everything runs at once on the CPU in host order, so a wait never blocks: what counts is the record
of who waits for what. An event remembers which of its records is the newest, since a wait refers
to that one even when the event is recorded again later.
"""

from __future__ import annotations

from typing import Any

import torch

from real.trace import OpKind
from sim.cuda.device import FakeDevice, active_device


class Stream:
    """An in-order queue of a fake device; stands for `torch.cuda.Stream`."""

    _device: FakeDevice
    stream_id: int
    priority: int

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del device
        if kwargs:
            names = ", ".join(sorted(kwargs))
            raise NotImplementedError(f"The fake torch.cuda.Stream does not take {names}.")
        self._bind(active_device(), priority)

    @classmethod
    def _on(cls, device: FakeDevice, *, priority: int) -> Stream:
        stream = cls.__new__(cls)
        stream._bind(device, priority)
        return stream

    def _bind(self, device: FakeDevice, priority: int) -> None:
        self._device = device
        self.priority = priority
        self.stream_id = device.new_stream_id(priority)

    @property
    def device(self) -> torch.device:
        """The device in torch's words."""
        return torch.device("cuda", self._device.index)

    @property
    def device_index(self) -> int:
        """The device's number."""
        return self._device.index

    @property
    def device_type(self) -> int:
        """The number that torch has for the kind of device: CUDA."""
        return 1

    @property
    def cuda_stream(self) -> int:
        """A number that is different for each stream of a device."""
        return self.stream_id

    @property
    def native_handle(self) -> int:
        """The same as `cuda_stream`."""
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns the least and the greatest priority, as a data centre GPU has them."""
        return (0, -5)

    def wait_event(self, event: Event) -> None:
        """Orders all later work of this stream after the event's newest record."""
        record = event._newest_record
        self._device.recorder.record(
            OpKind.EVENT_WAIT, stream=self.stream_id, event=event.event_id, record=record
        )
        self._device.join_capture(self.stream_id, event=record)

    def wait_stream(self, stream: Stream) -> None:
        """Orders all later work of this stream after all work that `stream` has so far."""
        self._device.recorder.record(OpKind.STREAM_WAIT, stream=self.stream_id, on=stream.stream_id)
        self._device.join_capture(self.stream_id, stream=stream.stream_id)

    def record_event(self, event: Event | None = None) -> Event:
        """Records `event`, or a new one, on this stream and returns it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Returns True: work is done as soon as it is queued."""
        return True

    def is_capturing(self) -> bool:
        """Whether this stream takes part in a graph capture."""
        return self._device.is_capturing(self.stream_id)

    def synchronize(self) -> None:
        """Makes the host wait for this stream."""
        self._device.recorder.record(OpKind.HOST_SYNC, what="stream", on=self.stream_id)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash((self._device.index, self.stream_id))

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Stream device=cuda:{self._device.index} id={self.stream_id}>"


class Event:
    """A marker that one stream records and another waits for; stands for `torch.cuda.Event`."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        del blocking
        if interprocess or external:
            raise NotImplementedError(
                "The fake torch.cuda.Event models neither interprocess nor external events."
            )
        self.enable_timing = enable_timing
        self._device = active_device()
        self.event_id = self._device.new_event_id()
        self._newest_record: int | None = None
        self._newest_stream: Stream | None = None

    @property
    def device(self) -> torch.device:
        """The device in torch's words."""
        return torch.device("cuda", self._device.index)

    @property
    def cuda_event(self) -> int:
        """A number that is different for each event of a device."""
        return self.event_id

    def record(self, stream: Stream | None = None) -> None:
        """Marks what `stream`, or the current stream, has queued so far."""
        stream = self._device.current_stream() if stream is None else stream
        self._newest_stream = stream
        self._newest_record = self._device.recorder.record(
            OpKind.EVENT_RECORD, stream=stream.stream_id, event=self.event_id
        )
        self._device.note_event(stream.stream_id, self._newest_record)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes `stream`, or the current stream, wait for the newest record."""
        stream = self._device.current_stream() if stream is None else stream
        stream.wait_event(self)

    def query(self) -> bool:
        """Returns True: work is done as soon as it is queued."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Refuses: the fake runtime has an order and no clock."""
        raise NotImplementedError(
            "torch.cuda.Event.elapsed_time has no meaning here: the fake runtime has no clock."
        )

    def synchronize(self) -> None:
        """Makes the host wait for the newest record."""
        self._device.recorder.record(OpKind.HOST_SYNC, what="event", on=self._newest_record)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Event:
        """Refuses: ranks of the fake runtime share no events."""
        raise NotImplementedError("The fake torch.cuda.Event has no interprocess handles.")

    def ipc_handle(self) -> bytes:
        """Refuses: ranks of the fake runtime share no events."""
        raise NotImplementedError("The fake torch.cuda.Event has no interprocess handles.")

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Event {self.event_id}>"


class StreamContext:
    """Makes a stream current for the length of a block; stands for `torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        device = active_device()
        self._previous = device.current_stream()
        device.set_stream(self.stream)

    def __exit__(self, *args: object) -> None:
        if self._previous is not None:
            active_device().set_stream(self._previous)
            self._previous = None


def stream(stream: Stream | None) -> StreamContext:
    """Returns a context in which `stream` is current; None changes nothing."""
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    """Returns the current stream of the calling rank's device."""
    return active_device().current_stream()


def accelerator_current_stream(device: Any = None, /) -> Stream:
    """Returns the current stream; stands for `torch.accelerator.current_stream`."""
    return active_device().current_stream()


def default_stream(device: Any = None) -> Stream:
    """Returns the default stream of the calling rank's device."""
    return active_device().default_stream


def set_stream(stream: Stream) -> None:
    """Makes `stream` current."""
    if stream is not None:
        active_device().set_stream(stream)
