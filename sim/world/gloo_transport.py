"""The transport between ranks that are processes: headers and data over torch's ProcessGroupGloo.

[Note: a collective between processes]
Each rank sends every other rank of the group a block of fixed size: what it calls (so that
mismatches are found and named as in process), the size of what it gives to that rank, and the data
itself when it fits. Data that does not fit follows in a second message. Sends are queued when the
collective is issued; receives are posted when it is waited for, so an asynchronous collective is
asynchronous here too. A block also says up to which collective its sender has finished; all
messages to a rank below that number have arrived and are let go.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sim.cuda.device import active_device
from sim.world import collectives
from sim.world.collectives import Call
from sim.world.errors import MismatchError
from sim.world.faults import Disturber
from sim.world.place import Place, mismatch, place_of, waits_for
from sim.world.process_group import FakeProcessGroup, Handle

_BLOCK_BYTES: Final = 8192
_LENGTH_BYTES: Final = 4
_TAGS_PER_GROUP: Final = 1 << 18
_TAGS_PER_CALL: Final = 4
_HEADER, _DATA, _MESSAGE_HEADER, _MESSAGE_DATA = range(_TAGS_PER_CALL)


class LostRankError(RuntimeError):
    """Another process does not answer; why is for that process to say."""


class Board(Protocol):
    """Where a rank posts its place for the parent process to read."""

    def post(self, standing: str, *, is_waiting: bool) -> None:
        """Replaces what was posted before."""
        ...


class _Sent(NamedTuple):
    n: int
    target: int
    work: Any
    tensor: torch.Tensor  # gloo reads it until the work is done


class _Channel:
    """The gloo group under one or more groups of equal ranks."""

    def __init__(self, pg: Any) -> None:
        self.pg = pg
        self.num_groups = 0


class _Line:
    """One group's share of a channel: its tags, and what is on its way."""

    def __init__(self, channel: _Channel, group: FakeProcessGroup) -> None:
        self.pg = channel.pg
        self._first_tag = channel.num_groups * _TAGS_PER_GROUP
        channel.num_groups += 1
        self.rank = group.group_rank
        self.others = [i for i in range(len(group.ranks)) if i != group.group_rank]
        self.num_finished = 0
        self._finished_early: set[int] = set()
        self._sent: list[_Sent] = []

    def tag(self, n: int, kind: int) -> int:
        """Returns the tag of a message; numbers come back long after their messages are gone."""
        return self._first_tag + n * _TAGS_PER_CALL % _TAGS_PER_GROUP + kind

    def send(self, n: int, kind: int, tensor: torch.Tensor, target: int) -> None:
        """Queues a message."""
        try:
            work = self.pg.send([tensor], target, self.tag(n, kind))
        except RuntimeError as error:
            raise LostRankError(str(error)) from error
        # Nothing says that a single message has arrived: it is kept for good.
        keep_until = n if kind in (_HEADER, _DATA) else sys.maxsize
        self._sent.append(_Sent(keep_until, target, work, tensor))

    def receive(self, n: int, kind: int, tensor: torch.Tensor, source: int) -> Any:
        """Starts to receive a message."""
        try:
            return self.pg.recv([tensor], source, self.tag(n, kind))
        except RuntimeError as error:
            raise LostRankError(str(error)) from error

    def finish(self, n: int, num_finished_by: dict[int, int]) -> None:
        """Notes that collective `n` is done here, and lets go of what has arrived everywhere."""
        self._finished_early.add(n)
        while self.num_finished in self._finished_early:
            self._finished_early.discard(self.num_finished)
            self.num_finished += 1
        kept = []
        for sent in self._sent:
            if sent.n < num_finished_by.get(sent.target, 0):
                _wait(sent.work)
            else:
                kept.append(sent)
        self._sent = kept


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LostRankError(str(error)) from error


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpack(data: torch.Tensor, shapes: Sequence[tuple[str, list[int]]]) -> list[torch.Tensor]:
    tensors, start = [], 0
    for dtype_name, shape in shapes:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(data[start : start + tensor.nbytes])
        start += tensor.nbytes
        tensors.append(tensor)
    return tensors


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[str, list[int]]]:
    return [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]


class _Block(NamedTuple):
    """One decoded block: the header, and the data when it fits."""

    header: dict[str, Any]
    data: torch.Tensor | None


def _encode(header: dict[str, Any], data: torch.Tensor) -> torch.Tensor:
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    if _LENGTH_BYTES + len(text) > _BLOCK_BYTES:
        raise NotImplementedError(
            f"Expected a header of at most {_BLOCK_BYTES - _LENGTH_BYTES} bytes, got {len(text)}."
        )
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if _fits(len(text), data.numel()):
        block[len(head) : len(head) + data.numel()] = data
    return block


def _fits(text_bytes: int, data_bytes: int) -> bool:
    return _LENGTH_BYTES + text_bytes + data_bytes <= _BLOCK_BYTES


def _decode(block: torch.Tensor) -> _Block:
    length = int.from_bytes(bytes(block[:_LENGTH_BYTES].tolist()), "little")
    end = _LENGTH_BYTES + length
    header = json.loads(block[_LENGTH_BYTES:end].numpy().tobytes())
    size = header["bytes"]
    return _Block(header, block[end : end + size] if _fits(length, size) else None)


def _send_block(
    line: _Line, n: int, kinds: tuple[int, int], header: dict[str, Any], data: torch.Tensor, to: int
) -> None:
    block = _encode({**header, "bytes": data.numel()}, data)
    line.send(n, kinds[0], block, to)
    if _decode(block).data is None:
        line.send(n, kinds[1], data, to)


class _Receiver:
    """One block, and its data, on the way from one rank."""

    def __init__(self, line: _Line, n: int, kinds: tuple[int, int], source: int) -> None:
        self._line, self._n, self._kinds = line, n, kinds
        self.source = source
        self._block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        self._work = line.receive(n, kinds[0], self._block, source)

    def header(self) -> dict[str, Any]:
        """Waits for the block and returns its header."""
        _wait(self._work)
        self._decoded = _decode(self._block)
        return self._decoded.header

    def tensors(self) -> list[torch.Tensor]:
        """Waits for the data."""
        header, data = self._decoded
        if data is None:
            data = torch.empty(header["bytes"], dtype=torch.uint8)
            _wait(self._line.receive(self._n, self._kinds[1], data, self.source))
        return _unpack(data, header["shapes"])


class _CollectiveHandle:
    def __init__(self, transport: Gloo, line: _Line, place: Place, call: Call) -> None:
        self._transport = transport
        self._line = line
        self._place = place
        self._call: Call | None = call

    def is_done(self) -> bool:
        self.wait()  # gloo tells only who waits
        return True

    def wait(self) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            self._finish(call)

    def _finish(self, call: Call) -> None:
        line, place = self._line, self._place
        missing = [place.ranks[i] for i in line.others]
        self._transport.board.post(waits_for(place, missing), is_waiting=True)
        receivers = [_Receiver(line, place.n, (_HEADER, _DATA), i) for i in line.others]
        given: list[Sequence[torch.Tensor]] = [[] for _ in place.ranks]
        given[line.rank] = collectives.parts(call, line.rank, line.rank)
        mine = call.signature()
        wanted = collectives.wanted_sizes(call, len(place.ranks))
        finished = {}
        headers = {}
        for receiver in receivers:
            header = headers[receiver.source] = receiver.header()
            self._compare(receiver.source, mine, header)
            finished[receiver.source] = header["finished"]
        own = collectives.given_sizes(call)
        self._compare_sizes(call, line.rank, own[line.rank] if own else None, wanted)
        for source, header in headers.items():
            self._compare_sizes(call, source, header["size"], wanted)
        for receiver in receivers:
            given[receiver.source] = receiver.tensors()
        collectives.finish(call, given, line.rank)
        line.finish(place.n, finished)
        self._transport.board.post(f"running, last in {place}", is_waiting=False)

    def _compare(self, source: int, mine: dict[str, Any], header: dict[str, Any]) -> None:
        place = self._place
        problem = mismatch(
            place,
            rank=place.ranks[self._line.rank],
            mine=mine,
            other_rank=place.ranks[source],
            theirs=header["signature"],
        )
        if problem is not None:
            raise MismatchError(problem)

    def _compare_sizes(
        self, call: Call, source: int, given: int | None, wanted: Sequence[int]
    ) -> None:
        if given is None:
            return
        place, rank = self._place, self._line.rank
        problem = collectives.size_problem(
            call, place.ranks[source], given, place.ranks[rank], wanted[source]
        )
        if problem is not None:
            raise MismatchError(f"Sizes do not match in {place}: {problem}.")


class _MessageHandle:
    def __init__(
        self, transport: Gloo, line: _Line, place: Place, tensor: torch.Tensor, source: int
    ) -> None:
        self._transport = transport
        self._line = line
        self._place = place
        self._tensor: torch.Tensor | None = tensor
        self._receiver = _Receiver(line, place.n, (_MESSAGE_HEADER, _MESSAGE_DATA), source)

    def is_done(self) -> bool:
        self.wait()  # gloo tells only who waits
        return True

    def wait(self) -> None:
        if self._tensor is None:
            return
        tensor, self._tensor = self._tensor, None
        board = self._transport.board
        board.post(f"in {self._place}, waits for the message", is_waiting=True)
        self._receiver.header()
        [message] = self._receiver.tensors()
        if (message.dtype, message.numel()) != (tensor.dtype, tensor.numel()):
            raise MismatchError(
                f"Message {self._place} does not match: it has {message.numel()} elements of "
                f"{message.dtype}, expected {tensor.numel()} of {tensor.dtype}."
            )
        with torch.no_grad():
            tensor.detach().copy_(message.view_as(tensor))
        board.post(f"running, last in {self._place}", is_waiting=False)


class _Alone:
    """A collective of a group of one."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Gloo:
    """Exchanges the calls of ranks that are processes.

    Args:
        store: A store that all processes share.
        rank: This process's rank.
        timeout_s: How long a message may take before the run counts as hanging.
        board: Where this rank's place is posted.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float, board: Board) -> None:
        self.disturber = Disturber((), rank)
        self.board = board
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._channels: dict[tuple[int, ...], _Channel] = {}
        self._lines: dict[FakeProcessGroup, _Line] = {}

    def open(self, group: FakeProcessGroup) -> None:
        """Connects the processes of a group, once for all groups of equal ranks."""
        if len(group.ranks) == 1:
            return
        ranks = tuple(group.ranks)
        channel = self._channels.get(ranks)
        if channel is None:
            self.board.post(f"connects ranks {list(ranks)}", is_waiting=True)
            channel = self._channels[ranks] = _Channel(self._connect(ranks, group.group_rank))
            self.board.post("running", is_waiting=False)
        self._lines[group] = _Line(channel, group)

    def _connect(self, ranks: tuple[int, ...], group_rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        options._threads = 1  # sends and receives need none
        store = PrefixStore("ranks " + ",".join(map(str, ranks)), self._store)
        try:
            return gloo(store, group_rank, len(ranks), options)
        except RuntimeError as error:
            raise LostRankError(str(error)) from error

    def start(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        """Sends this rank's part of collective `n` to all others."""
        if len(group.ranks) == 1:
            collectives.complete([call])
            return _Alone()
        line = self._lines[group]
        place = place_of(group, n, call)
        signature = call.signature()
        sizes = collectives.given_sizes(call)
        for other in line.others:
            # A root alone gives; the others' sizes are empty.
            tensors = collectives.parts(call, line.rank, other)
            header = {
                "signature": signature,
                "finished": line.num_finished,
                "size": sizes[other] if sizes else None,
                "shapes": _shapes(tensors),
            }
            _send_block(line, n, (_HEADER, _DATA), header, _pack(tensors), other)
        return _CollectiveHandle(self, line, place, call)

    def send(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, target: int) -> None:
        """Sends a copy to another rank of the group."""
        header = {"shapes": _shapes([tensor])}
        kinds = (_MESSAGE_HEADER, _MESSAGE_DATA)
        _send_block(self._lines[group], n, kinds, header, _pack([tensor]).clone(), target)

    def receive(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, source: int) -> Handle:
        """Starts to receive from another rank of the group."""
        place = Place(
            kind=f"recv from rank {group.ranks[source]}",
            n=n,
            group=group.group_name,
            ranks=group.ranks,
            unit=active_device().recorder.unit,
        )
        return _MessageHandle(self, self._lines[group], place, tensor, source)
