"""The recorder of a GPU rank: small numbers for torch's streams, events, storages and handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from real.gpu.durations import DeviceTimes
from real.trace import OpKind, Recorder, Sink, active_recorder

_PRUNE_STORAGES_EVERY: Final = 4096
_weak_reference: Any = StorageWeakRef


class _EventMark(NamedTuple):
    """What stands on an event: whose number it has and which of its records is the newest."""

    recorder: Recorder
    number: int
    newest: int | None


_MARK: Final = "_trace_mark"


def priority_of(stream_id: int) -> int:
    """Returns the priority of one of torch's streams on the current device."""
    cuda: Any = torch.cuda
    stream = cuda.Stream(
        stream_id=stream_id, device_index=torch.cuda.current_device(), device_type=1
    )
    return int(stream.priority)


class GpuRecorder(Recorder):
    """A recorder that numbers torch's streams, events and storages by first appearance.

    Records of others may name a stream by torch's own id; it is replaced by the number.

    Args:
        sink: Where the records go.
        priority: Returns the priority of a stream, by torch's id.
        times: Also notes when things were issued and run; its sink must be `sink`.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        priority: Callable[[int], int] = priority_of,
        times: DeviceTimes | None = None,
    ) -> None:
        super().__init__(sink)
        self.is_silent = False
        self.times = times
        self._priority = priority
        self._streams: dict[int, int] = {}
        self._num_events = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._num_storages = 0
        self._num_calls: dict[str, int] = {}
        self._num_messages: dict[tuple[str, str, object], int] = {}
        self._coalesced: dict[str, list[int]] = {}
        self._works: dict[int, tuple[weakref.ref[Any], str, list[int]]] = {}

    def record(self, op: OpKind, **fields: object) -> int:
        """Appends one record and returns its sequence number; `stream` is torch's id."""
        stream = fields.get("stream")
        if stream is not None and op is not OpKind.STREAM:
            fields["stream"] = self.stream_number(stream)
        if self.times is None:
            return self._append(op, fields)
        seq = self._append(op, {"host_ns": self.times.now(), **fields})
        self.times.note(self, op)
        return seq

    def close(self) -> None:
        """Marks the trace complete and closes the sink."""
        if self.times is not None:
            self.times.resolve(self)
        super().close()

    def stream_number(self, stream_id: Any) -> int:
        """Returns the number of a stream by torch's id; a new one is recorded."""
        number = self._streams.get(stream_id)
        if number is None:
            number = self._streams[stream_id] = len(self._streams)
            self.record(OpKind.STREAM, stream=number, priority=self._priority(stream_id))
        return number

    # -- events -----------------------------------------------------------------------------

    def event_mark(self, event: Any) -> _EventMark:
        """Returns what is known of an event; a new one gets the next number."""
        mark = getattr(event, _MARK, None)
        if mark is None or mark.recorder is not self:
            mark = _EventMark(self, self._num_events, None)
            self._num_events += 1
            setattr(event, _MARK, mark)
        known: _EventMark = mark
        return known

    def event_record(self, event: Any, stream_id: int) -> None:
        """Notes that a stream records an event."""
        mark = self.event_mark(event)
        seq = self.record(OpKind.EVENT_RECORD, stream=stream_id, event=mark.number)
        setattr(event, _MARK, mark._replace(newest=seq))

    # -- storages ---------------------------------------------------------------------------

    def storage_number(self, storage: torch.UntypedStorage) -> int:
        """Returns a storage's number: the same as long as it lives, never used again after."""
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        if len(self._storages) >= _PRUNE_STORAGES_EVERY:
            self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        # The weak reference also keeps the address from being used for another storage.
        number = self._num_storages
        self._num_storages = number + 1
        self._storages[key] = (_weak_reference(storage), number)
        return number

    def _storage_numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        numbers = (self.storage_number(tensor.untyped_storage()) for tensor in tensors)
        return list(dict.fromkeys(numbers))

    # -- communication ----------------------------------------------------------------------

    def group_name(self, group: Any) -> str:
        """Returns torch's name of a process group; a new one is recorded with its ranks."""
        name = str(group.group_name)
        if name not in self._num_calls:
            self._num_calls[name] = 0
            self.record(OpKind.GROUP, group=name, ranks=dist.get_process_group_ranks(group))
        return name

    def collective(
        self,
        group: Any,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        is_async: bool,
        peer: object = None,
    ) -> tuple[str, int]:
        """Notes a call on a process group and returns the group's name and the call's number.

        Args:
            group: The process group.
            kind: Name of the operation, as the simulated process group calls it.
            inputs: What this rank gives.
            outputs: What this rank gets.
            is_async: Whether the caller gets a handle to wait for.
            peer: The other rank of a message, or None: messages are counted for each peer.
        """
        name = self.group_name(group)
        if kind in ("send", "recv"):
            key = (name, kind, peer)
            n = self._num_messages.get(key, 0)
            self._num_messages[key] = n + 1
        else:
            n = self._num_calls[name]
            self._num_calls[name] = n + 1
        counted = inputs or outputs
        self.record(
            OpKind.COLLECTIVE,
            stream=torch.cuda.current_stream().stream_id,
            group=name,
            n=n,
            kind=kind,
            bytes=sum(tensor.nbytes for tensor in counted),
            dtype=str(counted[0].dtype).removeprefix("torch.") if counted else "none",
            **{"async": is_async or name in self._coalesced},
            unit=self.unit,
            reads=self._storage_numbers(inputs),
            writes=self._storage_numbers(outputs),
        )
        return name, n

    def is_coalescing(self, group: Any) -> bool:
        """Whether calls on a group are being joined into one."""
        return str(group.group_name) in self._coalesced

    def begin_coalescing(self, group: Any) -> None:
        """Calls on the group are joined into one from now on."""
        self._coalesced[self.group_name(group)] = []

    def joins_coalesced(self, name: str, n: int) -> None:
        """Call `n` of a group is part of the joined one."""
        self._coalesced[name].append(n)

    def end_coalescing(self, group: Any, work: object) -> None:
        """The joined call is issued; `work` stands for all its parts."""
        name = self.group_name(group)
        self.expect_wait(work, name, self._coalesced.pop(name, []))

    def expect_wait(self, work: Any, group: str, calls: Sequence[int]) -> None:
        """Remembers which calls a handle stands for, until it is waited for or dropped."""
        if work is not None and calls:
            key = id(work)
            known = weakref.ref(work, lambda _: self._works.pop(key, None))
            self._works[key] = (known, group, list(calls))

    def waited(self, work: object) -> None:
        """Notes that the current stream waits for the calls that a handle stands for."""
        known = self._works.pop(id(work), None)
        if known is not None:
            _, group, calls = known
            for n in calls:
                stream = torch.cuda.current_stream().stream_id
                self.record(OpKind.COLLECTIVE_WAIT, stream=stream, group=group, n=n)


def speaking() -> GpuRecorder | None:
    """Returns the running rank's recorder when the wrappers have to write."""
    recorder = active_recorder()
    if isinstance(recorder, GpuRecorder) and not recorder.is_silent:
        return recorder
    return None


@contextmanager
def silent(recorder: GpuRecorder) -> Iterator[None]:
    """Keeps the wrappers from writing for the length of the block."""
    was_silent, recorder.is_silent = recorder.is_silent, True
    try:
        yield
    finally:
        recorder.is_silent = was_silent
