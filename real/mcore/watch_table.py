"""What is watched of a job under MFSDP v2: the table of this tree, for both modes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from real.hooks import UnitScheduler
from real.hooks.install import installed_handle
from real.mcore import clip, internals
from real.mcore.jobs import FsdpJob
from real.mcore.schedule import Mfsdp1F1B
from real.trace import OpKind, active_recorder
from real.watch import (
    Call,
    Point,
    fence_point,
    gradient_read_point,
    optimizer_point,
    record_stream_role,
)

NumberStorage = Callable[[torch.UntypedStorage], int]
"""Returns a storage's number in the trace."""


def points() -> list[Point]:
    """Returns every method whose calls are recorded. All exist once; ranks share them."""
    zero_filled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note_zero_filled(call: Call) -> None:
        _, unit, *_ = call.args
        zero_filled[unit.unit.module] = len(unit.countdown.missing())

    return [
        *internals.unit_points(lambda module: zero_filled.pop(module, 0)),
        Point(owner=UnitScheduler, name="_zero_fill", before=note_zero_filled),
        Point(
            owner=Mfsdp1F1B, name="_replace_param_with_raw_if_needed", after=_describe_communication
        ),
        fence_point(Mfsdp1F1B, "finish_grad_sync"),
        gradient_read_point(FsdpJob, "gradients", by="gradients"),
        gradient_read_point(clip, "grad_norm", by="grad_norm"),
        optimizer_point(FsdpJob, "optimizer_step"),
    ]


def describe(model: nn.Module, number_of: NumberStorage) -> None:
    """Records what a built model consists of: stream roles, units, parameters, names of buffers.

    Args:
        model: Under the adapter, or the root unit alone.
        number_of: Numbers a storage as the trace's other records do.
    """
    root = model.module if isinstance(model, Mfsdp1F1B) else model
    _describe_streams(root)
    _describe_units(root, model.grad_divisors if isinstance(model, Mfsdp1F1B) else None)
    _describe_parameters(root)
    _name_buffers(root, number_of)


def _describe_streams(root: nn.Module) -> None:
    context = internals.initialize_context(root)
    record_stream_role(torch.cuda.current_stream(), "compute")
    record_stream_role(context.all_gather_stream, "all-gather")
    record_stream_role(context.reduce_scatter_stream, "reduce-scatter")


def _describe_communication(_: Call) -> None:
    """The combined schedule has made its stream when it calls the adapter for the first time."""
    stream = internals.communication_stream()
    if stream is not None:
        record_stream_role(stream, "communication")


def _describe_units(root: nn.Module, divisors: dict[str, int] | None) -> None:
    for name, unit in internals.collect_units(root).items():
        divided = {} if divisors is None else {"divisor": divisors.get(name, 1)}
        active_recorder().record(
            OpKind.UNIT,
            unit=name,
            parameters=unit.num_parameters,
            trainable=len(unit.trainable_parameters),
            bytes=unit.full_bytes,
            ranks=unit.ranks,
            **divided,
        )


def _describe_parameters(root: nn.Module) -> None:
    handle = installed_handle(root)
    gradients = () if handle is None else handle.plan.gradients
    fires = {gradient.parameter: gradient.fires for gradient in gradients}
    for owned in internals.owned_parameters(root):
        active_recorder().record(
            OpKind.PARAMETER,
            parameter=owned.name,
            unit=owned.unit,
            fires=fires.get(owned.name, 0),
            delayed=owned.is_delayed,
            names=owned.names,
            shape=list(owned.parameter.shape),
            dtype=str(owned.parameter.dtype).removeprefix("torch."),
        )


def _name_buffers(root: nn.Module, number_of: NumberStorage) -> None:
    """Names the buffers of every unit, as "decoder.layers.0:full weight"."""
    for unit, kind, storage in internals.unit_storages(root):
        active_recorder().record(
            OpKind.NAME,
            storage=number_of(storage),
            name=f"{unit}:{kind}",
            bytes=storage.nbytes(),
        )
