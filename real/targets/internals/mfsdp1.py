"""Reads MFSDP v1's buckets: names, full gradients, full weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Bucket(NamedTuple):
    """One parameter group of MFSDP v1: what is gathered and reduced at once.

    Attributes:
        index: Number of the bucket.
        unit: Name of the module that holds all its parameters; with the bucket's number where
            another bucket has that module too.
        names: Full names of its parameters, in the order of the bucket.
        group: MFSDP's own object.
    """

    index: int
    unit: str
    names: list[str]
    group: Any


def buckets_of(model: Any) -> list[Bucket]:
    """Returns the buckets of a wrapped model.

    Args:
        model: Megatron's `FullyShardedDataParallel`.
    """
    buffer = model.module.param_and_grad_buffer
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
    return ".".join(shared)


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
