"""A process group of one GPU whose other ranks are not there.

Kernels, memory, streams and the host's work are those of the rank that this process stands for, of
a job of any size. Only the exchange is missing: what peers would send is made of what this rank
gives (`real.gpu.fill`), so losses mean nothing.

[Note: streams as NCCL's]
A synchronous collective runs on the current stream. An asynchronous one runs on a stream of the
group's own, which first waits for the current one; the wait for its handle makes the stream that is
current then wait for it, and the tensors are kept until then. A barrier stops the host.
"""
# ruff: noqa: D102 - methods of torch.distributed.ProcessGroup, called from C++ and torch

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from real.gpu.fill import fill, scale_of
from real.targets import Target

BACKEND: Final = "loopback"
LOSSES_MEAN_NOTHING: Final = "loopback peers: losses mean nothing and are not compared"

_ProcessGroup: Any = dist.ProcessGroup  # its methods are overloaded in C++


@dataclass(frozen=True)
class Seat:
    """The place of the one rank that is there.

    Attributes:
        rank: Its number.
        world_size: Ranks of the job that it stands in.
    """

    rank: int
    world_size: int

    def as_dict(self) -> dict[str, Any]:
        """Returns what a report of such a run has to say, as plain data."""
        return {"peers": BACKEND, "rank": self.rank, "note": LOSSES_MEAN_NOTHING}


class LoopbackWork(dist.Work):
    """What a call returns.

    Args:
        done: Events after which the outputs are written; none where they already are, or where the
            current stream writes them.
        kept: Tensors that live until the wait.
        result: What the call hands to those who ask for it.
        pending: The group's handles that nobody has waited for; it leaves them at the wait. One
            that C++ alone holds would lose its Python half.
    """

    def __init__(
        self,
        done: Sequence[torch.cuda.Event],
        kept: Sequence[torch.Tensor],
        result: Any,
        pending: set[LoopbackWork],
    ) -> None:
        super().__init__()
        self.done = list(done)
        self.kept = list(kept)
        self._result = result
        self._pending = pending
        if done:
            pending.difference_update([work for work in pending if work.is_completed()])
            pending.add(self)

    def is_completed(self) -> bool:
        return all(event.query() for event in self.done)

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        for event in self.done:
            torch.cuda.current_stream().wait_event(event)
        self.kept = []
        self._pending.discard(self)
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


class LoopbackProcessGroup(_ProcessGroup):
    """A process group in which this rank is alone.

    Args:
        name: torch's name of the group.
        rank: This rank's number in the group.
        size: Ranks of the group.
    """

    work_class: Final = LoopbackWork

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = name
        self._rank = rank
        self._size = size
        self._own_stream: torch.cuda.Stream | None = None
        self._joined: list[LoopbackWork] | None = None
        self._pending: set[LoopbackWork] = set()

    # -- identity ---------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """The name that torch has for the group."""
        return self._name

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return BACKEND

    def _get_backend(self, device: Any) -> LoopbackProcessGroup:
        return self  # torch asks it which calls it can join into one

    def __repr__(self) -> str:
        return f"LoopbackProcessGroup({self._name!r}, rank {self._rank} of {self._size})"

    # -- issuing: [Note: streams as NCCL's] ---------------------------------------------------

    def _issue(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        opts: Any,
        *,
        result: Any = None,
        scale: Any = 1,
    ) -> dist.Work:
        def write() -> None:
            fill(kind, inputs, outputs, group_size=self._size, rank=self._rank, scale=scale)

        tensors = [*inputs, *outputs]
        is_async = bool(getattr(opts, "asyncOp", False))
        if is_async and any(tensor.is_cuda for tensor in tensors):
            stream = self._stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                write()
                done = torch.cuda.Event()
                done.record(stream)
            work = LoopbackWork([done], tensors, result, self._pending)
        else:
            write()
            work = LoopbackWork([], [], result, self._pending)
        if self._joined is not None:
            self._joined.append(work)
        return work

    def _stream(self) -> torch.cuda.Stream:
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream()
        return self._own_stream

    def _start_coalescing(self, device: Any = None) -> None:
        self._joined = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        parts, self._joined = self._joined or [], None
        return LoopbackWork(
            [event for part in parts for event in part.done],
            [tensor for part in parts for tensor in part.kept],
            None,
            self._pending,
        )

    def _reduced(self, kind: str, inputs: Any, outputs: Any, opts: Any) -> dist.Work:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        scale = scale_of(op, self._size)
        return self._issue(kind, inputs, outputs, opts, result=outputs, scale=scale)

    # -- collectives, by the names that torch.distributed calls -----------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._issue("all_gather", [inputs[0]], list(outputs[0]), opts, result=outputs)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        return self._issue("all_gather", [input], [output], opts, result=[output])

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        return self._issue("all_gather", list(inputs), list(outputs), opts, result=outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        by_rank = [tensor for tensors in outputs for tensor in tensors]
        return self._issue("all_gather", list(inputs), by_rank, opts, result=outputs)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        return self._reduced("reduce_scatter", [input], [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = [tensor for tensors in inputs for tensor in tensors]
        return self._reduced("reduce_scatter", flat, list(outputs), opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        return self._reduced("reduce_scatter", list(inputs), list(outputs), opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        return self._reduced("all_reduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors)
        if opts is None or opts.rootRank == self._rank:
            return self._reduced("reduce", tensors, tensors, opts)
        return self._issue("reduce", tensors, tensors, opts, result=tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        return self._issue("broadcast", tensors, tensors, opts, result=tensors)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        parts = list(inputs[0]) if inputs else []
        return self._issue("scatter", parts, list(outputs), opts, result=outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        parts = list(outputs[0]) if outputs else []
        return self._issue("gather", list(inputs), parts, opts, result=outputs)

    def alltoall_base(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        return self._issue("all_to_all_single", [input], [output], opts, result=[output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._issue("all_to_all", list(inputs), list(outputs), opts, result=outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self._issue("barrier", [], [], opts)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        raise NotImplementedError(f"Expected no message among loopback peers, got send to {dst}.")

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        raise NotImplementedError(f"Expected no message among loopback peers, got recv of {src}.")

    # torch 2.14 calls some of them by other names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _create(options: Any, _: Any) -> LoopbackProcessGroup:
    return LoopbackProcessGroup(options.group_id, options.group_rank, options.group_size)


def init_loopback(seat: Seat) -> None:
    """Starts torch.distributed for the one rank that is there."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # The store is there because torch wants one; nobody waits for a key in it.
    dist.init_process_group(BACKEND, store=HashStore(), rank=seat.rank, world_size=seat.world_size)


class _Zeroed(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "empty":  # by name: it may be a stand-in
            result.detach().zero_()
        return result


@contextmanager
def built_alone(seat: Seat | None, target: Target | None) -> Iterator[None]:
    """Lets a rank that stands alone build its job in the block; among peers nothing changes.

    Args:
        seat: The rank; None where its peers are there.
        target: What it builds; None for a job without FSDP.
    """
    with padded_with_zeros(seat), ExitStack() as stack:
        if seat is not None and target is not None:
            stack.enter_context(target.alone())
        yield


@contextmanager
def padded_with_zeros(seat: Seat | None) -> Iterator[None]:
    """Lets new tensors begin with zeros for the block, when a rank stands alone.

    A shard ends in padding, which nobody writes. Among its peers it stays at the end of what is
    gathered; alone, a rank's shard comes again and again, and its padding with it: random bits
    among the weights would choose experts, and may be NaN.
    """
    if seat is None:
        yield
        return
    with _Zeroed():
        yield
