"""Wrappers of a process group's methods: one record a collective, as in the simulated group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from real.gpu.recorder import speaking


class _Collective(NamedTuple):
    """A method of a process group.

    Attributes:
        kind: What the records call it.
        outputs: Which argument holds what this rank gets, or None.
        inputs: Which argument holds what this rank gives, or None.
    """

    kind: str
    outputs: int | None
    inputs: int | None


COLLECTIVES: Final[dict[str, _Collective]] = {
    "allgather": _Collective("all_gather", 0, 1),
    "allgather_coalesced": _Collective("all_gather", 0, 1),
    "allgather_into_tensor_coalesced": _Collective("all_gather", 0, 1),
    "_allgather_base": _Collective("all_gather", 0, 1),
    "reduce_scatter": _Collective("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": _Collective("reduce_scatter", 0, 1),
    "_reduce_scatter_base": _Collective("reduce_scatter", 0, 1),
    "allreduce": _Collective("all_reduce", 0, 0),
    "allreduce_coalesced": _Collective("all_reduce", 0, 0),
    "reduce": _Collective("reduce", 0, 0),
    "broadcast": _Collective("broadcast", 0, 0),
    "scatter": _Collective("scatter", 0, 1),
    "gather": _Collective("gather", 0, 1),
    "alltoall_base": _Collective("all_to_all_single", 0, 1),
    "alltoall": _Collective("all_to_all", 0, 1),
    "barrier": _Collective("barrier", None, None),
    "send": _Collective("send", None, 0),
    "recv": _Collective("recv", 0, None),
    # torch 2.14 calls some of them by other names.
    "all_gather_single": _Collective("all_gather", 0, 1),
    "all_gather_single_coalesced": _Collective("all_gather", 0, 1),
    "reduce_scatter_single": _Collective("reduce_scatter", 0, 1),
    "reduce_scatter_single_coalesced": _Collective("reduce_scatter", 0, 1),
    "all_to_all_single": _Collective("all_to_all_single", 0, 1),
}
"""Methods of `torch.distributed.ProcessGroup`, through which every function of torch.distributed
goes. Functional collectives, which the compiler makes, go another way and are not seen."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _collective(spec: _Collective) -> Callable[[Any], Callable[..., Any]]:
    is_message = spec.kind in ("send", "recv")

    def wrap(original: Any) -> Callable[..., Any]:
        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = speaking()
            if recorder is None:
                return original(self, *args, **kwargs)
            values = [*args, *kwargs.values()]
            is_async = is_message or any(getattr(v, "asyncOp", False) is True for v in values)
            name, n = recorder.collective(
                self,
                spec.kind,
                [] if spec.inputs is None else list(_tensors(values[spec.inputs])),
                [] if spec.outputs is None else list(_tensors(values[spec.outputs])),
                is_async=is_async,
                peer=values[1] if is_message else None,
            )
            is_joined = recorder.is_coalescing(self)
            # An asynchronous call runs on a stream of the communicator's own, out of reach.
            times = None if is_async or is_joined else recorder.times
            span = None if times is None else times.begin(recorder)
            work = recorder.unheard(original, self, *args, **kwargs)
            if times is not None and span is not None:
                times.end(recorder, span)
            if is_joined:
                recorder.joins_coalesced(name, n)
            elif is_async:
                recorder.expect_wait(work, name, [n])
            return work

        return issue

    return wrap


def _start_coalescing(original: Any) -> Callable[..., Any]:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = speaking()
        if recorder is not None:
            recorder.begin_coalescing(self)
        return original(self, *args, **kwargs)

    return start


def _end_coalescing(original: Any) -> Callable[..., Any]:
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        recorder = speaking()
        if recorder is not None:
            recorder.end_coalescing(self, work)
        return work

    return end


def work_wait(original: Any) -> Callable[..., Any]:
    """Wraps the wait of a handle, be it `torch.distributed.Work`'s or a class's of Python."""

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = speaking()
        if recorder is None:
            return original(self, *args, **kwargs)
        recorder.waited(self)
        return recorder.unheard(original, self, *args, **kwargs)

    return wait


def wrappers() -> Iterator[tuple[str, Callable[[Any], Callable[..., Any]]]]:
    """Yields every method of a process group that is wrapped, with its wrapper."""
    for name, spec in COLLECTIVES.items():
        yield name, _collective(spec)
    yield "_start_coalescing", _start_coalescing
    yield "_end_coalescing", _end_coalescing
