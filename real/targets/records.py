"""What a target's job records of itself once it is built."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from real.trace import OpKind, Recorder, active_recorder
from real.watch.records import record_stream_role

StorageId = Callable[[torch.UntypedStorage], int]
"""Returns the number that a trace has for a storage."""

_storage_ids: weakref.WeakKeyDictionary[Recorder, StorageId] = weakref.WeakKeyDictionary()


def keep_storage_ids(storage_id: StorageId) -> None:
    """Makes `record_name` number storages for the active recorder."""
    _storage_ids[active_recorder()] = storage_id


def record_name(unit: str, kind: str, tensor: torch.Tensor) -> None:
    """Names a tensor's storage as a unit's buffer, as "full weight"."""
    recorder = active_recorder()
    storage_id = _storage_ids.get(recorder)
    if recorder.is_recording and storage_id is not None:
        storage = tensor.untyped_storage()
        recorder.record(
            OpKind.NAME,
            storage=storage_id(storage),
            unit=unit,
            kind=kind,
            bytes=storage.nbytes(),
        )


def record_roles(all_gather: Any, reduce_scatter: Any) -> None:
    """Records what the streams of a job are for; the current one computes."""
    record_stream_role(torch.cuda.current_stream(), "compute")
    record_stream_role(all_gather, "all-gather")
    record_stream_role(reduce_scatter, "reduce-scatter")


def record_unit(
    unit: str,
    *,
    parameters: Iterable[nn.Parameter],
    num_bytes: int,
    ranks: list[int],
    divisor: int,
    is_kept: bool = False,
) -> None:
    """Records a unit: its size, the ranks that share it, and what its mean gradient is divided by.

    Args:
        unit: Its name.
        parameters: Its parameters, frozen ones included.
        num_bytes: Bytes of its full parameters, padding included.
        ranks: Global ranks that its parameters are spread over.
        divisor: Of the mean over `ranks`.
        is_kept: Whether its full weights stay over the border of a step.
    """
    all_parameters = list(parameters)
    active_recorder().record(
        OpKind.UNIT,
        unit=unit,
        parameters=len(all_parameters),
        trainable=sum(parameter.requires_grad for parameter in all_parameters),
        bytes=num_bytes,
        ranks=ranks,
        divisor=divisor,
        **({"kept": True} if is_kept else {}),
    )


def record_parameter(unit: str, names: list[str], parameter: nn.Parameter) -> None:
    """Records a unit's parameter, once for each of its names.

    How many gradients a microbatch gives it cannot be asked from outside, so that is left open.
    """
    for name in names:
        active_recorder().record(
            OpKind.PARAMETER,
            parameter=name,
            unit=unit,
            fires=None,
            delayed=bool(getattr(parameter, "skip_backward_post_hook", False)),
            names=names,
            shape=list(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
        )
