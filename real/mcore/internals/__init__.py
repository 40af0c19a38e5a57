"""The one place that touches Megatron's private names.

Everything else under `real` speaks to the classes and functions that are named here. They are
checked against one release series (`real.mcore.versions`), and imported when first asked for: a
tree of another kind has the schedule's nodes and the process state too, but not the units.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from real.mcore.versions import missing_names

if TYPE_CHECKING:
    from real.mcore.internals.execution import detach_execution_hooks, divide_gradients
    from real.mcore.internals.gradients import (
        GradientShard,
        full_gradients,
        full_weights,
        gradient_shards,
    )
    from real.mcore.internals.layouts import memoize_layouts
    from real.mcore.internals.lifetime import drop_schedule_state, loosen
    from real.mcore.internals.nodes import NodeCall, observed_nodes, tell_backward_nodes
    from real.mcore.internals.optimizer import shard_optimizer
    from real.mcore.internals.process_state import (
        PROCESS_CLASS_ATTRIBUTES,
        PROCESS_GLOBALS,
        SHARE_STORAGE_LOADER,
    )
    from real.mcore.internals.schedule import communication_stream, join_schedule
    from real.mcore.internals.state_dict import guard_state_dict
    from real.mcore.internals.units import (
        MfsdpContext,
        MfsdpUnit,
        collect_units,
        initialize_context,
        is_fsdp_module,
        keep_accumulators,
        owned_parameters,
        unit_of_sharded,
        unit_storages,
    )
    from real.mcore.internals.watch import (
        unit_points,
        watched_backwards,
        watched_finalize,
        watched_layers,
        watched_units,
    )

__all__ = [
    "PROCESS_CLASS_ATTRIBUTES",
    "PROCESS_GLOBALS",
    "SHARE_STORAGE_LOADER",
    "GradientShard",
    "MfsdpContext",
    "MfsdpUnit",
    "NodeCall",
    "collect_units",
    "communication_stream",
    "detach_execution_hooks",
    "divide_gradients",
    "drop_schedule_state",
    "full_gradients",
    "full_weights",
    "gradient_shards",
    "guard_state_dict",
    "initialize_context",
    "is_fsdp_module",
    "join_schedule",
    "keep_accumulators",
    "loosen",
    "memoize_layouts",
    "observed_nodes",
    "owned_parameters",
    "shard_optimizer",
    "tell_backward_nodes",
    "unit_of_sharded",
    "unit_points",
    "unit_storages",
    "watched_backwards",
    "watched_finalize",
    "watched_layers",
    "watched_units",
]

_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "execution": (
        "detach_execution_hooks",
        "divide_gradients",
    ),
    "gradients": (
        "GradientShard",
        "full_gradients",
        "full_weights",
        "gradient_shards",
    ),
    "layouts": ("memoize_layouts",),
    "lifetime": (
        "drop_schedule_state",
        "loosen",
    ),
    "nodes": (
        "NodeCall",
        "observed_nodes",
        "tell_backward_nodes",
    ),
    "optimizer": ("shard_optimizer",),
    "process_state": (
        "PROCESS_CLASS_ATTRIBUTES",
        "PROCESS_GLOBALS",
        "SHARE_STORAGE_LOADER",
    ),
    "schedule": (
        "communication_stream",
        "join_schedule",
    ),
    "state_dict": ("guard_state_dict",),
    "units": (
        "MfsdpContext",
        "MfsdpUnit",
        "collect_units",
        "initialize_context",
        "is_fsdp_module",
        "keep_accumulators",
        "owned_parameters",
        "unit_of_sharded",
        "unit_storages",
    ),
    "watch": (
        "unit_points",
        "watched_backwards",
        "watched_finalize",
        "watched_layers",
        "watched_units",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


if not missing_names():  # all at once, before anybody swaps names of torch
    for _name in _MODULES:
        importlib.import_module(f"{__name__}.{_name}")
