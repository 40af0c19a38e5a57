"""A torch.distributed process group of fake ranks.

Every method packs its arguments into a `Call` and hands it to a transport. `InProcess` matches the
calls of all ranks in place and `Gloo` exchanges them between processes; both worlds share one class
and one meaning of every collective.
"""
# ruff: noqa: D102 - methods of torch.distributed.ProcessGroup, called from C++ and torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

from real.trace import OpKind
from sim.cuda.device import FakeDevice, active_device
from sim.world import collectives
from sim.world.collectives import Call
from sim.world.faults import Disturber
from sim.world.world import current_world

BACKEND: Final = "fakeworld"

_REDUCE_OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def reduce_op_name(op: Any) -> str:
    """Returns the name of a torch reduce op.

    Raises:
        NotImplementedError: The op is not known.
    """
    for name in _REDUCE_OPS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise NotImplementedError(f"Expected one of the reduce ops {', '.join(_REDUCE_OPS)}, got {op}.")


class Handle(Protocol):
    """A collective on its way."""

    def is_done(self) -> bool:
        """Tells whether the outputs are written; lets other ranks run while they are not."""
        ...

    def wait(self) -> None:
        """Returns when the outputs are written."""
        ...


class Transport(Protocol):
    """Moves the calls of one rank to the other ranks of a group."""

    disturber: Disturber

    def open(self, group: FakeProcessGroup) -> None:
        """Gets ready to serve a new group; all its ranks open it."""
        ...

    def start(self, group: FakeProcessGroup, n: int, call: Call) -> Handle:
        """Issues the group's collective number `n`."""
        ...

    def send(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, target: int) -> None:
        """Sends a copy of `tensor` to group rank `target` and returns at once."""
        ...

    def receive(self, group: FakeProcessGroup, n: int, tensor: torch.Tensor, source: int) -> Handle:
        """Starts to receive from group rank `source`; `n` counts messages of that pair."""
        ...


class _Issued(NamedTuple):
    """A call on its way.

    Attributes:
        handle: Tells when its outputs are written.
        n: Its number in the group, or in its pair and direction.
        message: The fields that say which pair and direction; none for a collective.
    """

    handle: Handle
    n: int
    message: dict[str, Any] = {}  # noqa: RUF012 - never changed


class _Work(dist.Work):
    """What an asynchronous call returns; done when its last call is done."""

    def __init__(self, group: FakeProcessGroup, handles: Sequence[_Issued], result: Any) -> None:
        super().__init__()
        self._group = group
        self._handles = list(handles)
        self._result = result
        self._future: _LazyFuture | None = None

    @property
    def is_waited_for(self) -> bool:
        return not self._handles

    def is_completed(self) -> bool:
        return all(issued.handle.is_done() for issued in self._handles)

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        for issued in self._handles:
            issued.handle.wait()
            self._group.record_wait(issued.n, **issued.message)
        self._handles = []
        if self._future is not None:
            self._future._settle()
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = _LazyFuture(self._finish)
        return self._future

    def _finish(self) -> Any:
        if self._handles:
            self.wait()
        return self._result


class _LazyFuture(Future[Any]):
    """The result of a call on its way: asking for it lets the other ranks run, having it does not.

    NCCL's future is there at once and its callbacks are queued on the device. Here a callback runs
    when somebody asks for the value, or waits for the work.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self._children: list[_LazyFuture] = []
        self._is_settling = False

    def _settle(self) -> None:
        if self._is_settling:
            return  # the wait that makes the value asks for it too
        self._is_settling = True
        if not super().done():
            self.set_result(self._make())
        self._is_settling = False
        children, self._children = self._children, []
        for child in children:
            child._settle()

    def done(self) -> bool:
        """Returns True: the work is queued, and what reads its result is ordered after it."""
        return True

    def wait(self) -> Any:
        self._settle()
        return super().wait()

    def value(self) -> Any:
        return self.wait()

    def then(self, callback: Callable[..., Any]) -> _LazyFuture:
        child = _LazyFuture(lambda: callback(self))
        self._children.append(child)
        return child

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self.then(callback)


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_ProcessGroup: Any = dist.ProcessGroup  # its methods are overloaded in C++


class FakeProcessGroup(_ProcessGroup):
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
        self._coalesced: list[_Issued] | None = None
        # A Work that C++ alone holds would lose its Python half; kept until it is waited for.
        self._works: list[_Work] = []
        transport.open(self)
        active_device().recorder.record(OpKind.GROUP, group=name, ranks=list(ranks))

    # -- identity ---------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """The name that torch has for the group."""
        return self._name

    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.ranks)

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return BACKEND

    def _get_backend(self, device: Any) -> FakeProcessGroup:
        return self  # torch asks it which calls it can join into one

    def __repr__(self) -> str:
        return f"FakeProcessGroup({self._name!r}, rank {self.group_rank} of {self.ranks})"

    # -- issuing ----------------------------------------------------------------------------

    def record_wait(self, n: int, **message: Any) -> None:
        """Notes that the current stream waits for collective number `n`, or for a message."""
        device = active_device()
        device.recorder.record(
            OpKind.COLLECTIVE_WAIT,
            stream=device.current_stream().stream_id,
            group=self._name,
            n=n,
            **message,
        )

    def _issue(self, call: Call, opts: Any, result: Any) -> dist.Work:
        collectives.check_layouts(call)
        collectives.check_sizes(call, len(self.ranks))
        is_async = bool(getattr(opts, "asyncOp", False)) or self._coalesced is not None
        if len(self.ranks) == 1:
            return self._finish([self._start(call, is_async)], is_async, result)
        disturber = self._transport.disturber
        if disturber.holds(lambda: self._issue_late(call, is_async)):
            return _Work(self, [], result)
        work = self._finish([self._start(call, is_async)], is_async, result)
        disturber.release()
        return work

    def _issue_late(self, call: Call, is_async: bool) -> None:
        """Issues a collective whose caller was told that it is done."""
        issued = self._start(call, is_async)
        if not is_async:
            issued.handle.wait()

    def _start(self, call: Call, is_async: bool) -> _Issued:
        device = active_device()
        n = self._num_calls
        self._num_calls = n + 1
        call.unit = device.recorder.unit
        device.recorder.record(
            OpKind.COLLECTIVE,
            stream=device.current_stream().stream_id,
            group=self._name,
            n=n,
            kind=call.kind,
            bytes=call.num_bytes,
            dtype=call.dtype,
            **{"async": is_async},
            unit=call.unit,
            reads=_storage_ids(device, call.inputs),
            writes=_storage_ids(device, call.outputs),
        )
        if is_async and len(self.ranks) > 1:
            with torch._C._DisableTorchDispatch():
                collectives.blank_outputs(call)
        return _Issued(self._transport.start(self, n, call), n)

    def _finish(self, handles: list[_Issued], is_async: bool, result: Any) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.extend(handles)
        elif not is_async:
            for issued in handles:
                issued.handle.wait()
            handles = []
        work = _Work(self, handles, result)
        if handles:
            self._works = [w for w in self._works if not w.is_waited_for]
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
            **_reduction(opts),
        )
        return self._issue(call, opts, outputs)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        call = Call(kind="all_reduce", inputs=tensors, outputs=tensors, **_reduction(opts))
        return self._issue(call, opts, tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        call = Call(
            kind="reduce",
            inputs=list(tensors),
            outputs=list(tensors),
            **_reduction(opts),
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
            in_splits=_as_list(input_splits) or self._even_splits(input),
            out_splits=_as_list(output_splits) or self._even_splits(output),
        )
        return self._issue(call, opts, [output])

    def _even_splits(self, tensor: torch.Tensor) -> list[int]:
        return collectives.even_splits(tensor, len(self.ranks))

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
        collectives.check_layout(tensors[0], "a send")
        n = self._message_number(self.group_rank, dst)
        message = self._record_message("send", n, tensors[0], dst)
        self._transport.send(self, n, tensors[0], dst)
        return self._finish([_Issued(_Done(), n, message)], True, tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        collectives.check_layout(tensors[0], "a recv")
        n = self._message_number(src, self.group_rank)
        message = self._record_message("recv", n, tensors[0], src)
        handle = self._transport.receive(self, n, tensors[0], src)
        return self._finish([_Issued(handle, n, message)], True, tensors)

    def _record_message(self, kind: str, n: int, tensor: torch.Tensor, peer: int) -> dict[str, Any]:
        """Records a message to or from group rank `peer`; returns what tells it from others."""
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
            reads=_storage_ids(device, [tensor] if kind == "send" else []),
            writes=_storage_ids(device, [tensor] if kind == "recv" else []),
            peer=self.ranks[peer],
        )
        return {"kind": kind, "peer": self.ranks[peer]}


def _storage_ids(device: FakeDevice, tensors: Sequence[torch.Tensor]) -> list[int]:
    ids = (device.storage_id(tensor.untyped_storage()) for tensor in tensors)
    return list(dict.fromkeys(ids))


def _reduction(opts: Any) -> dict[str, Any]:
    """Returns a call's fields that say how it reduces."""
    if opts is None:
        return {"reduce_op": "SUM"}
    name = reduce_op_name(opts.reduceOp)
    if name != "PREMUL_SUM":
        return {"reduce_op": name}
    factor = opts.reduceOp.factor
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    return {"reduce_op": name, "factor": float(factor)}


def _as_list(splits: Any) -> list[int] | None:
    if splits is None:
        return None
    return [int(n) for n in splits] or None


def _create(options: Any, _: Any) -> FakeProcessGroup:
    world, rank = current_world()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    transport: Transport = world.transport_of(rank)
    return FakeProcessGroup(transport, options.group_id, options.group_rank, ranks)


def init_process_group(rank: int, world_size: int) -> None:
    """Starts torch.distributed for one rank of the calling thread's world."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # The store is there because torch wants one; nobody waits for a key in it.
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    active_device().num_devices = world_size  # one host holds them all
