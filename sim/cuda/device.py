"""One rank's fake device: its streams, the current stream, storage names and the record writer.

[Note: the stream inside backward]
On a GPU autograd runs each backward node in a device thread whose current stream is the one that
was current when the node was made in the forward. On a CPU the same node runs in the calling
thread. Torch numbers nodes in the order they are made, per thread, and the number can be read
before the next node exists. The device therefore notes that number at every change of the current
stream; inside backward the node's own number then says which stream was current at its birth.
Accumulators carry no such number; theirs is found another way [Note: the stream of an accumulator].
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from real.trace import OpKind, Recorder
from sim.cuda.autograd import ACCUMULATOR_SEQUENCE, GraphTask

if TYPE_CHECKING:
    from sim.cuda.streams import Stream

_NUMBER: Final = "_fake_cuda_number"

# Taken before any swap, so that the device keeps working while torch's names are replaced.
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """Says which storage has died."""

    __slots__ = ("number",)
    number: int


class FakeDevice:
    """The state of one fake GPU.

    Args:
        index: The number that torch calls the device by.
        recorder: Where the records go.
    """

    def __init__(self, index: int, recorder: Recorder) -> None:
        from sim.cuda.streams import Stream

        self.index = index
        self.num_devices = index + 1  # until a world says how many there are
        self.recorder = recorder
        self.host_rng_state = torch.Generator().get_state()
        self.num_events = 0
        self.nvtx_depth = 0
        self.graph_tasks: list[GraphTask] = []
        self._num_streams = 0
        self._num_graphs = 0
        # Streams that take part in the capture on its way, the one that it began on first.
        self._capturing: list[int] = []
        self._captured_events: set[int] = set()
        self._capture_stream: Stream | None = None
        self._num_storages = 0
        self._alive: dict[int, _StorageReference] = {}
        self.default_stream: Stream = Stream._on(self, priority=0)
        self._host_stream: Stream = self.default_stream
        self._node_stream: tuple[int, Stream] | None = None
        self._births: list[int] = [-1]
        self._birth_streams: list[Stream] = [self.default_stream]

    def new_stream_id(self, priority: int) -> int:
        """Numbers a new stream and records it."""
        stream_id = self._num_streams
        self._num_streams = stream_id + 1
        self.recorder.record(OpKind.STREAM, stream=stream_id, priority=priority)
        return stream_id

    def new_event_id(self) -> int:
        """Numbers a new event."""
        event_id = self.num_events
        self.num_events = event_id + 1
        return event_id

    def new_graph_id(self) -> int:
        """Numbers a new graph, or a memory pool of graphs."""
        graph_id = self._num_graphs
        self._num_graphs = graph_id + 1
        return graph_id

    def capture_stream(self) -> Stream:
        """Returns the stream that captures begin on where none is given."""
        from sim.cuda.streams import Stream

        if self._capture_stream is None:
            self._capture_stream = Stream._on(self, priority=0)
        return self._capture_stream

    def begin_capture(self) -> int:
        """Begins a capture on the current stream, whose number it returns.

        Raises:
            RuntimeError: A capture is on its way.
        """
        if self._capturing:
            raise RuntimeError("Cannot begin a capture inside another one.")
        self._capturing = [self.current_stream().stream_id]
        return self._capturing[0]

    def end_capture(self) -> int:
        """Ends the capture and returns the number of the stream that it began on.

        Raises:
            RuntimeError: No capture is on its way.
        """
        if not self._capturing:
            raise RuntimeError("Cannot end a capture before one begins.")
        first = self._capturing[0]
        self._capturing = []
        self._captured_events.clear()
        return first

    def is_capturing(self, stream_id: int) -> bool:
        """Whether a stream takes part in the capture on its way."""
        return stream_id in self._capturing

    def join_capture(
        self, stream_id: int, *, stream: int | None = None, event: int | None = None
    ) -> None:
        """Has a stream take part in a capture when what it waits for does."""
        if self._capturing and stream_id not in self._capturing:
            if stream in self._capturing or event in self._captured_events:
                self._capturing.append(stream_id)

    def note_event(self, stream_id: int, record: int) -> None:
        """Notes the record of an event, for streams that wait for it during a capture."""
        if stream_id in self._capturing:
            self._captured_events.add(record)

    def current_stream(self) -> Stream:
        """Returns what a GPU would have as current stream [Note: the stream inside backward]."""
        node = _current_node()
        if node is None:
            self._node_stream = None
            return self._host_stream
        sequence = node._sequence_nr()
        if self._node_stream is not None and self._node_stream[0] == sequence:
            return self._node_stream[1]
        return self._stream_at_birth(node, sequence)

    def _stream_at_birth(self, node: object, sequence: int) -> Stream:
        if sequence == ACCUMULATOR_SEQUENCE:
            if len(self._births) == 1 or not self.graph_tasks:
                return self._host_stream
            first_use = self.graph_tasks[-1].first_use(node)
            if first_use is None:
                return self._host_stream
            sequence = first_use
        return self._birth_streams[bisect_right(self._births, sequence) - 1]

    def set_stream(self, stream: Stream) -> None:
        """Makes `stream` current until the next change, inside backward until the node ends."""
        node = _current_node()
        if node is None:
            self._host_stream = stream
        else:
            sequence = node._sequence_nr()
            # Back to the node's own stream is no change: accumulators share one number, and a
            # change that was taken back must not reach the next one.
            is_own = stream is self._stream_at_birth(node, sequence)
            self._node_stream = None if is_own else (sequence, stream)
        self._note_birth(stream)

    def _note_birth(self, stream: Stream) -> None:
        sequence = _sequence_number()
        if self._births[-1] == sequence:
            self._birth_streams[-1] = stream
        elif self._birth_streams[-1] is not stream:
            self._births.append(sequence)
            self._birth_streams.append(stream)

    def has_numbered(self, storage: torch.UntypedStorage) -> bool:
        """Whether this device has given the storage a number."""
        known = storage.__dict__.get(_NUMBER)
        return known is not None and known[0] is self

    def storage_id(self, storage: torch.UntypedStorage) -> int:
        """Returns a storage's number: the same as long as it lives, never used again after."""
        # The number rides on the storage's Python object, which lives as long as the storage does.
        known = storage.__dict__.get(_NUMBER)
        if known is not None and known[0] is self:
            return int(known[1])
        storage_id = self._num_storages
        self._num_storages = storage_id + 1
        storage.__dict__[_NUMBER] = (self, storage_id)
        return storage_id

    def number_until_freed(self, storage: torch.UntypedStorage) -> int:
        """Returns a new storage's number, and records when its last tensor dies."""
        reference = _StorageReference(storage, self._freed)
        reference.number = self.storage_id(storage)
        self._alive[reference.number] = reference
        return reference.number

    def _freed(self, reference: _StorageReference) -> None:
        del self._alive[reference.number]
        self.recorder.record(OpKind.FREE, storage=reference.number)


class _Active(threading.local):
    device: FakeDevice | None = None


_active = _Active()


def find_device() -> FakeDevice | None:
    """Returns the fake device of the calling thread, or None."""
    return _active.device


def active_device() -> FakeDevice:
    """Returns the fake device of the calling thread.

    Raises:
        RuntimeError: No fake device is in use in this thread.
    """
    device = _active.device
    if device is None:
        raise RuntimeError("Cannot use fake CUDA before use_device(); no device in this thread.")
    return device


@contextmanager
def use_device(device: FakeDevice) -> Iterator[FakeDevice]:
    """Makes `device` the calling thread's GPU for the length of the block."""
    previous = _active.device
    _active.device = device
    try:
        yield device
    finally:
        _active.device = previous
