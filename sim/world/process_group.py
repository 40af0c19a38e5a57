"""A torch.distributed process group whose ranks live in one process.

Every method packs its arguments into a `Call` and hands it to a transport. `InProcess` matches the
calls of all ranks in place; the gloo world brings another transport for the same class, so both
worlds share one meaning of every collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from real.trace import OpKind
from sim.cuda.device import active_device
from sim.world import collectives
from sim.world.collectives import Call
from sim.world.faults import SkipCollective, SwapCollectives
from sim.world.world import MismatchError, World, current_world

BACKEND: Final = "fakeworld"

_REDUCE_OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduce_op_name(op: Any) -> str:
    """Returns the name of a torch reduce op.

    Raises:
        NotImplementedError: The op is none of the plain ones.
    """
    for name in _REDUCE_OPS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise NotImplementedError(f"Expected one of the reduce ops {', '.join(_REDUCE_OPS)}, got {op}.")


class Handle(Protocol):
    """A collective on its way."""

    def is_done(self) -> bool:
        """Returns whether the outputs are written."""
        ...

    def wait(self) -> None:
        """Returns when the outputs are written."""
        ...


class Transport(Protocol):
    """Moves the calls of one rank to the other ranks of a group."""

    def start(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        """Issues the group's collective number `n`."""
        ...

    def send(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, target: int) -> None:
        """Sends a copy of `tensor` to group rank `target` and returns at once."""
        ...

    def receive(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, source: int) -> Handle:
        """Starts to receive from group rank `source`; `n` counts messages of that pair."""
        ...


class _Work(dist.Work):
    """What an asynchronous call returns; done when its last call is done."""

    def __init__(self, group: FakeProcessGroup, handles: Sequence[tuple[int, Handle]], result: Any):
        super().__init__()
        self._group = group
        self._handles = list(handles)
        self._result = result

    def is_completed(self) -> bool:
        return all(handle.is_done() for _, handle in self._handles)

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        for n, handle in self._handles:
            handle.wait()
            self._group.record_wait(n)
        self._handles = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class FakeProcessGroup(dist.ProcessGroup):
    """A process group of fake ranks.

    Args:
        transport: Moves the data.
        name: torch's name of the group, equal on all its ranks.
        rank: This rank's number in the group.
        ranks: Global ranks of the group, in group order.
    """

    def __init__(self, transport: Transport, name: str, rank: int, ranks: list[int]) -> None:
        super().__init__(rank, len(ranks))
        self._transport = transport
        self._name = name
        self.group_rank = rank
        self.ranks = ranks
        self._num_calls = 0
        self._num_messages: dict[tuple[int, int], int] = {}
        self._coalesced: list[tuple[int, Handle]] | None = None
        self._held_back: tuple[int, Call] | None = None
        # A Work that C++ alone holds would lose its Python half; kept until it is done.
        self._works: list[_Work] = []
        active_device().recorder.record(OpKind.GROUP, group=name, ranks=list(ranks))

    # -- identity ---------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.ranks)

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return BACKEND

    def __repr__(self) -> str:
        return f"FakeProcessGroup({self._name!r}, rank {self.group_rank} of {self.ranks})"

    # -- issuing ----------------------------------------------------------------------------

    def record_wait(self, n: int) -> None:
        """Notes that the current stream waits for collective number `n`."""
        device = active_device()
        device.recorder.record(
            OpKind.COLLECTIVE_WAIT,
            stream=device.current_stream().stream_id,
            group=self._name,
            n=n,
        )

    def _issue(self, call: Call, opts: Any, result: Any) -> dist.Work:
        is_async = bool(getattr(opts, "asyncOp", False)) or self._coalesced is not None
        handles = [self._start(call, is_async)]
        return self._finish(handles, is_async, result)

    def _start(self, call: Call, is_async: bool) -> tuple[int, Handle]:
        device = active_device()
        n = self._num_calls
        self._num_calls = n + 1
        device.recorder.record(
            OpKind.COLLECTIVE,
            stream=device.current_stream().stream_id,
            group=self._name,
            n=n,
            kind=call.kind,
            bytes=call.num_bytes,
            dtype=call.dtype,
            **{"async": is_async},
            unit=device.recorder.unit,
        )
        return n, self._transport.start(self, n, call)

    def _finish(
        self, handles: list[tuple[int, Handle]], is_async: bool, result: Any
    ) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.extend(handles)
        elif not is_async:
            for _, handle in handles:
                handle.wait()
            handles = []
        work = _Work(self, handles, result)
        if handles:
            self._works = [w for w in self._works if not w.is_completed()]
            self._works.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        handles = self._coalesced or []
        self._coalesced = None
        return self._finish(handles, True, None)

    # -- collectives, by the names that torch.distributed calls -----------------------------

    def allgather(self, output_tensors: Any, input_tensor: Any, opts: Any = None) -> dist.Work:
        call = Call(kind="all_gather", inputs=[input_tensor[0]], outputs=list(output_tensors[0]))
        if len(call.outputs) == 1:
            call.outputs = [call.outputs[0]]
        return self._issue(call, opts, output_tensors)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        call = Call(kind="all_gather", inputs=[input], outputs=[output])
        return self._issue(call, opts, [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        call = Call(kind="all_gather", inputs=list(inputs), outputs=list(outputs))
        return self._issue(call, opts, outputs)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = [output for outputs in zip(*output_lists, strict=True) for output in outputs]
        call = Call(kind="all_gather", inputs=list(inputs), outputs=flat)
        return self._issue(call, opts, output_lists)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = [tensor for tensors in inputs for tensor in tensors]
        return self.reduce_scatter_tensor_coalesced(outputs, flat, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        call = Call(
            kind="reduce_scatter",
            inputs=list(inputs),
            outputs=list(outputs),
            reduce_op=_op_of(opts),
        )
        return self._issue(call, opts, outputs)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        call = Call(kind="all_reduce", inputs=tensors, outputs=tensors, reduce_op=_op_of(opts))
        return self._issue(call, opts, tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        call = Call(
            kind="reduce",
            inputs=list(tensors),
            outputs=list(tensors),
            reduce_op=_op_of(opts),
            root=opts.rootRank,
        )
        return self._issue(call, opts, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        root = 0 if opts is None else opts.rootRank
        call = Call(kind="broadcast", inputs=tensors, outputs=tensors, root=root)
        return self._issue(call, opts, tensors)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        parts = list(inputs[0]) if inputs else []
        call = Call(kind="scatter", inputs=parts, outputs=list(outputs), root=opts.rootRank)
        return self._issue(call, opts, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        parts = list(outputs[0]) if outputs else []
        call = Call(kind="gather", inputs=list(inputs), outputs=parts, root=opts.rootRank)
        return self._issue(call, opts, outputs)

    def alltoall_base(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        call = Call(
            kind="all_to_all_single",
            inputs=[input],
            outputs=[output],
            in_splits=_as_list(input_splits),
            out_splits=_as_list(output_splits),
        )
        return self._issue(call, opts, [output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        call = Call(kind="all_to_all", inputs=list(inputs), outputs=list(outputs))
        return self._issue(call, opts, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._issue(Call(kind="barrier"), opts, None)

    # torch 2.14 calls some of them by other names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- point to point ---------------------------------------------------------------------

    def _message_number(self, source: int, target: int) -> int:
        n = self._num_messages.get((source, target), 0)
        self._num_messages[(source, target)] = n + 1
        return n

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        n = self._message_number(self.group_rank, dst)
        self._record_message("send", n, tensors[0])
        self._transport.send(self, n, tensors[0], dst)
        return self._finish([(n, _Done())], True, tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        n = self._message_number(src, self.group_rank)
        self._record_message("recv", n, tensors[0])
        return self._finish([(n, self._transport.receive(self, n, tensors[0], src))], True, tensors)

    def _record_message(self, kind: str, n: int, tensor: torch.Tensor) -> None:
        device = active_device()
        device.recorder.record(
            OpKind.COLLECTIVE,
            stream=device.current_stream().stream_id,
            group=self._name,
            n=n,
            kind=kind,
            bytes=tensor.nbytes,
            dtype=str(tensor.dtype).removeprefix("torch."),
            **{"async": True},
            unit=device.recorder.unit,
        )


def _op_of(opts: Any) -> str:
    return "SUM" if opts is None else reduce_op_name(opts.reduceOp)


def _as_list(splits: Any) -> list[int] | None:
    if splits is None:
        return None
    return [int(n) for n in splits] or None


# -- the in-process transport -----------------------------------------------------------------


class _Meeting:
    """One collective of one group: who has arrived, and with what."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.calls: dict[int, Call] = {}
        self.is_done = False


class _MeetingHandle:
    def __init__(self, world: World, rank: int, meeting: _Meeting, standing: str) -> None:
        self._world = world
        self._rank = rank
        self._meeting = meeting
        self._standing = standing

    def is_done(self) -> bool:
        return self._meeting.is_done

    def wait(self) -> None:
        if self._meeting.is_done:
            return
        meeting = self._meeting
        missing = [r for i, r in enumerate(meeting.ranks) if i not in meeting.calls]
        standing = f"{self._standing}, waits for rank {', '.join(map(str, missing))}"
        self._world.wait_until(self._rank, self.is_done, standing)


class _MessageHandle:
    def __init__(self, world: World, rank: int, key: tuple[Any, ...], tensor: torch.Tensor) -> None:
        self._world = world
        self._rank = rank
        self._key = key
        self._tensor = tensor
        self._is_done = False

    def is_done(self) -> bool:
        if not self._is_done and self._key in self._world.rendezvous:
            message = self._world.rendezvous.pop(self._key)
            with torch.no_grad():
                self._tensor.detach().copy_(message.view_as(self._tensor))
            self._is_done = True
        return self._is_done

    def wait(self) -> None:
        _, group, source, _, n = self._key
        standing = f"in recv #{n} of group {group!r}, waits for a message of group rank {source}"
        self._world.wait_until(self._rank, self.is_done, standing)


class InProcess:
    """Matches the calls of ranks that share this process."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._num_issued = 0
        self._held_back: tuple[FakeProcessGroup, int, Call] | None = None

    def start(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        """Joins the meeting of collective `n`, and completes it when this rank is the last."""
        index = self._num_issued
        self._num_issued = index + 1
        for fault in self._world.faults:
            if fault.rank == self._rank and fault.index == index:
                if isinstance(fault, SkipCollective):
                    group._num_calls -= 1
                    return _Done()
                if isinstance(fault, SwapCollectives):
                    group._num_calls -= 1
                    self._held_back = (group, n, call)
                    return _Done()
        handle = self._join(group, n, call)
        if self._held_back is not None:
            held_group, _, held_call = self._held_back
            self._held_back = None
            held_n = held_group._num_calls
            held_group._num_calls = held_n + 1
            self._join(held_group, held_n, held_call)
        return handle

    def _join(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        world = self._world
        key = (group.group_name, tuple(group.ranks), n)
        meeting = world.rendezvous.get(key)
        if meeting is None:
            meeting = world.rendezvous[key] = _Meeting(group.ranks)
        standing = self._standing(group, n, call)
        self._compare(group, n, call, meeting, standing)
        meeting.calls[group.group_rank] = call
        if len(meeting.calls) == len(group.ranks):
            del world.rendezvous[key]
            calls = [meeting.calls[i] for i in range(len(group.ranks))]
            self._check_splits(calls, standing)
            collectives.complete(calls, range(len(calls)))
            meeting.is_done = True
            world.wake(group.ranks)
        return _MeetingHandle(world, self._rank, meeting, standing)

    def _standing(self, group: FakeProcessGroup, n: int, call: Call) -> str:
        unit = active_device().recorder.unit
        at = "" if unit is None else f" for FSDP unit {unit!r}"
        return f"in {call.kind} #{n} of group {group.group_name!r} (ranks {group.ranks}){at}"

    def _compare(
        self, group: FakeProcessGroup, n: int, call: Call, meeting: _Meeting, standing: str
    ) -> None:
        mine = call.signature()
        for other_rank, other in meeting.calls.items():
            theirs = other.signature()
            different = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
            if different:
                what = "; ".join(
                    f"{k}: expected {theirs.get(k)}, got {mine.get(k)}" for k in different
                )
                self._world.note(self._rank, standing)
                raise MismatchError(
                    f"Collective #{n} of group {group.group_name!r} does not match: rank "
                    f"{group.ranks[other_rank]} calls {other.kind}, rank {self._rank} calls "
                    f"{call.kind} ({what})."
                )

    def _check_splits(self, calls: list[Call], standing: str) -> None:
        if calls[0].kind == "all_to_all_single":
            problem = collectives.check_all_to_all(calls)
            if problem is not None:
                self._world.note(self._rank, standing)
                raise MismatchError(f"All-to-all splits do not match, {standing}: {problem}.")

    def send(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, target: int) -> None:
        """Leaves a copy for the receiver."""
        key = ("message", group.group_name, group.group_rank, target, n)
        self._world.rendezvous[key] = tensor.detach().clone()
        self._world.wake([group.ranks[target]])

    def receive(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, source: int) -> Handle:
        """Takes the copy that the sender left, or waits for it."""
        key = ("message", group.group_name, source, group.group_rank, n)
        return _MessageHandle(self._world, self._rank, key, tensor)


def _create(options: Any, _: Any) -> FakeProcessGroup:
    world, rank = current_world()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    transport = world.transport_of(rank)
    return FakeProcessGroup(transport, options.group_id, options.group_rank, ranks)


def init_process_group(rank: int, world_size: int) -> None:
    """Starts torch.distributed for one rank of the calling thread's world."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, _create, extended_api=True, devices=["cpu", "cuda"]
        )
    # The store is there because torch wants one; nobody waits for a key in it.
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
