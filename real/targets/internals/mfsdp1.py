"""Reads MFSDP v1's buckets: names, full gradients, full weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
    AllGatherPipeline,
    BucketStatus,
    DataParallelBuffer,
    GradReducePipeline,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    gather_and_compute_chunk_metadata,
)
from torch.distributed.tensor import DTensor

from real.targets.records import record_name, record_parameter, record_roles, record_unit
from real.trace import OpKind, Recorder, active_recorder
from real.watch.points import Call, Point
from real.watch.records import UnitView, fence_point, reduce_point, reshard_point, unshard_point


class Bucket(NamedTuple):
    """One parameter group of MFSDP v1: what is gathered and reduced at once.

    Attributes:
        number: MFSDP counts buckets from 0.
        unit: Name of the module that holds all its parameters; with the bucket's number where
            another bucket has that module too.
        names: Full names of its parameters, in the order of the bucket.
        group: MFSDP's own object.
    """

    number: int
    unit: str
    names: list[str]
    group: Any


_buckets: weakref.WeakKeyDictionary[Any, list[Bucket]] = weakref.WeakKeyDictionary()


def buckets_of(model: Any) -> list[Bucket]:
    """Returns the buckets of a wrapped model.

    Args:
        model: Megatron's `FullyShardedDataParallel`.
    """
    return _buckets_in(model.module.param_and_grad_buffer)


def _buckets_in(buffer: Any) -> list[Bucket]:
    found = _buckets.get(buffer)
    if found is None:
        found = _buckets[buffer] = _find_buckets(buffer)
    return found


def _find_buckets(buffer: Any) -> list[Bucket]:
    found: list[Bucket] = []
    for index, group in enumerate(buffer.parameter_groups):
        names = [strip(buffer.param_to_name[parameter]) for parameter in group.params]
        unit = _common_module(names)
        if any(bucket.unit == unit for bucket in found):
            unit = f"{unit}#{index}"
        found.append(Bucket(index, unit, names, group))
    return found


def strip(name: str) -> str:
    """Returns a parameter's name under the model, without the wrappers' prefixes."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _common_module(names: list[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared).removesuffix(".local_experts")


def full_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gathers the reduced gradient of every trainable parameter, by name. Collective."""
    return dict(_gathered(model, "main_grad_buffer"))


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """Gathers the main weight of every trainable parameter, by name. Collective."""
    return dict(_gathered(model, "main_weight_buffer"))


def gradient_shards(model: Any) -> Iterator[torch.Tensor]:
    """Yields what this rank keeps of the reduced gradients, one tensor a bucket."""
    for bucket in buckets_of(model):
        if bucket.group.main_grad_buffer is not None:
            yield bucket.group.main_grad_buffer.data


def _gathered(model: Any, attribute: str) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in buckets_of(model):
        buffer = getattr(bucket.group, attribute)
        if buffer is None or not bucket.group.requires_grad:
            continue
        whole = _whole(buffer)
        for item, name in enumerate(bucket.names):
            place = buffer.item_index_map[item]
            part = whole[place.global_data_index : place.global_data_index + place.size]
            yield name, part.view(bucket.group.params[item].shape).float().clone()


def _whole(buffer: Any) -> torch.Tensor:
    if not buffer.is_data_distributed:
        return torch.as_tensor(buffer.data)
    whole = torch.empty(buffer.bucket_index.size, dtype=buffer.data.dtype, device="cuda")
    torch.distributed.all_gather_into_tensor(whole, buffer.data, group=buffer.data_parallel_group)
    return whole


@contextmanager
def unjudged_shards() -> Iterator[None]:
    """Lets a rank build whose peers' answers are made of its own.

    MFSDP asks all ranks where their shards of a parameter lie and refuses gaps. The questions stay
    for the length of the block, the verdict goes.
    """
    judge = param_and_grad_buffer.validate_uneven_dtensor
    param_and_grad_buffer.validate_uneven_dtensor = _ask_for_shards
    try:
        yield
    finally:
        param_and_grad_buffer.validate_uneven_dtensor = judge


def _ask_for_shards(sharded: DTensor) -> None:
    gather_and_compute_chunk_metadata(sharded)
    is_at_end = torch.zeros(sharded.ndim, 2, dtype=torch.int32).cuda()
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            group = sharded.device_mesh.get_group(axis)
            torch.distributed.all_reduce(is_at_end, torch.distributed.ReduceOp.MAX, group)


class _Place(NamedTuple):
    """One bucket in a pipeline: what a watched call works on."""

    pipeline: Any
    number: int
    key: Any = None

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        return _buckets_in(self.pipeline.buffer)[self.number]


_VIEW = UnitView(
    name=lambda place: place.bucket.unit,
    is_gathered=lambda place: (
        place.pipeline.bucket_status[place.key]
        in (BucketStatus.COMMUNICATING, BucketStatus.READY_TO_USE)
    ),
)


def points() -> Sequence[Point]:
    """Returns what to watch of MFSDP v1.

    A gather begins in `async_bucket_gather`, but torch issues it when the block that coalesces it
    ends: that block is watched too, so that the collective is the unit's.
    """
    return (
        Point(owner=AllGatherPipeline, name="async_bucket_gather", before=_tell_coalescing),
        unshard_point(AllGatherPipeline, "async_bucket_gather", _VIEW, unit_of=_of_gather),
        reshard_point(AllGatherPipeline, "release_bucket", _VIEW, unit_of=_of_release),
        Point(owner=AllGatherPipeline, name="reset", before=_rest),
        reduce_point(
            GradReducePipeline, "_bucket_group_gradient_reduce", _VIEW, unit_of=_of_reduction
        ),
        Point(owner=param_and_grad_buffer, name="_coalescing_manager", after=_attribute),
        Point(owner=DataParallelBuffer, name="allocate_bucket_storage", after=_name_bucket),
        fence_point(MegatronFSDP, "finish_grad_sync"),
    )


def _argument(call: Call, index: int, name: str, default: Any = None) -> Any:
    return call.args[index] if len(call.args) > index else call.kwargs.get(name, default)


def _of_gather(call: Call) -> _Place:
    index, is_backward = _argument(call, 1, "bucket_id"), _argument(call, 2, "bwd", False)
    return _Place(call.subject, index, call.subject.get_bucket_key(index, is_backward))


def _of_release(call: Call) -> _Place | None:
    place = _of_gather(call)
    is_empty = place.pipeline.bucket_status[place.key] is BucketStatus.EMPTY
    return None if is_empty or _argument(call, 3, "lazy", False) else place


def _of_reduction(call: Call) -> _Place:
    return _Place(call.subject, _argument(call, 1, "bucket_group")[0])


def _rest(call: Call) -> None:
    """Buckets outside every layer keep their storage; from here on their weights are old."""
    pipeline = call.subject
    for bucket in _buckets_in(pipeline.buffer):
        place = _Place(pipeline, bucket.number, pipeline.get_bucket_key(bucket.number, False))
        if bucket.group.fsdp_unit_id is None and _VIEW.is_gathered(place):
            stream = torch.cuda.current_stream().stream_id
            active_recorder().record(OpKind.RESHARD, unit=bucket.unit, stream=stream)


class _Coalescing:
    """A block that issues collectives at its end, for the unit that asked for them inside."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self.unit: str | None = None

    def __enter__(self) -> Any:
        _open[active_recorder()] = self
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> Any:
        recorder = active_recorder()
        _open.pop(recorder, None)
        previous = recorder.unit
        recorder.unit = previous if self.unit is None else self.unit
        try:
            return self._block.__exit__(*error)
        finally:
            recorder.unit = previous


_open: weakref.WeakKeyDictionary[Recorder, _Coalescing] = weakref.WeakKeyDictionary()


def _attribute(call: Call) -> None:
    call.result = _Coalescing(call.result)


def _tell_coalescing(call: Call) -> None:
    block = _open.get(active_recorder())
    if block is not None:
        block.unit = _of_gather(call).bucket.unit


def _name_bucket(call: Call) -> None:
    """Names a bucket's full storage, which comes anew with each use."""
    buffer = call.subject
    if not active_recorder().is_recording or not buffer.params:
        return
    for parameter_buffer, buckets in list(_buckets.items()):
        if buffer.params[0] in parameter_buffer.param_to_param_group:
            group = buckets[buffer.bucket_index.bucket_id].group
            kind = "full weight" if buffer is group.model_weight_buffer else "full gradient"
            record_name(buckets[buffer.bucket_index.bucket_id].unit, kind, call.result.data)


def describe(model: Any) -> None:
    """Records the units, parameters, streams and buffers of a wrapped model."""
    fsdp = model.module
    record_roles(fsdp.side_stream_for_param_gather, fsdp.side_stream_for_buffer_copy_and_grad_accum)
    for bucket in buckets_of(model):
        _describe_bucket(bucket)


def _describe_bucket(bucket: Bucket) -> None:
    group = bucket.group
    weights = group.model_weight_buffer
    ranks = torch.distributed.get_process_group_ranks(weights.data_parallel_group)
    gradients = group.main_grad_buffer
    scale = None if gradients is None else gradients.gradient_scaling_factor
    record_unit(
        bucket.unit,
        parameters=group.params,
        num_bytes=weights.bucket_index.size * weights.data.element_size(),
        ranks=list(ranks),
        divisor=1 if scale is None else round(1 / (scale * len(ranks))),
        is_kept=bucket.unit == "",  # of no module that MFSDP v1 treats as a unit: never released
    )
    for name, parameter in zip(bucket.names, group.params, strict=True):
        record_parameter(bucket.unit, [name], parameter)
    for kind, buffer in (
        ("model weight", weights),
        ("main weight", group.main_weight_buffer),
        ("main gradient", gradients),
    ):
        if buffer is not None:
            record_name(bucket.unit, kind, buffer.data)
