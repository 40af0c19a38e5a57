"""How the released combined schedule finds the adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel.utils import get_comm_stream

_released_finder = combined_1f1b.find_megatron_fsdp
_joined: Counter[type] = Counter()
"""How many adapters of each type are joined now."""


def communication_stream() -> torch.cuda.Stream | None:
    """Returns the stream of the token exchange; the combined schedule makes it before it starts."""
    stream: torch.cuda.Stream | None = get_comm_stream()
    return stream


def join_schedule(adapter_type: type) -> Callable[[], None]:
    """Makes `combined_1f1b` find adapters of `adapter_type`, and returns what undoes it.

    The released schedule looks for the v1 wrapper by class. The replacement keeps no model, so one
    of them serves every model, rank and type of adapter; the last undo restores the original.
    """

    def find_adapter(model: Any) -> Any:
        wrapper = model
        while wrapper is not None:
            if isinstance(wrapper, tuple(_joined)):
                return wrapper
            wrapper = getattr(wrapper, "module", None)
        return _released_finder(model)

    if not _joined:
        combined_1f1b.find_megatron_fsdp = find_adapter
    _joined[adapter_type] += 1
    is_joined = True

    def leave() -> None:
        nonlocal is_joined
        if is_joined:
            is_joined = False
            _joined[adapter_type] -= 1
            if not _joined[adapter_type]:
                del _joined[adapter_type]
            if not _joined:
                combined_1f1b.find_megatron_fsdp = _released_finder

    return leave
