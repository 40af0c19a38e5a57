"""Remembers the layouts of MFSDP's buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout

_released_build = GlobalLayout.__dict__["build"]
_num_memoizing = 0


def memoize_layouts() -> Callable[[], None]:
    """Makes MFSDP remember the layouts of its buffers, and returns what undoes it.

    MFSDP lays out every gradient buffer anew, at about a millisecond of host time each, although a
    layout is a frozen value that depends on shapes and ranks alone.
    """
    global _num_memoizing

    @functools.cache
    def build(tensor_shapes: tuple[torch.Size, ...], dp_size: int) -> GlobalLayout:
        return _released_build.__func__(GlobalLayout, tensor_shapes, dp_size=dp_size)

    def build_once(
        cls: type[GlobalLayout], tensor_shapes: Iterable[Any], dp_size: int
    ) -> GlobalLayout:
        return build(tuple(torch.Size(shape) for shape in tensor_shapes), dp_size)

    if _num_memoizing == 0:
        GlobalLayout.build = classmethod(build_once)
    _num_memoizing += 1
    is_memoizing = True

    def undo() -> None:
        nonlocal is_memoizing
        global _num_memoizing
        if is_memoizing:
            is_memoizing = False
            _num_memoizing -= 1
            if _num_memoizing == 0:
                GlobalLayout.build = _released_build

    return undo
