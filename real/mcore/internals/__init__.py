"""The one place that touches Megatron's private names.

Everything else under `real` speaks to the classes and functions that are named here. They are
checked against one release series (`real.mcore.versions`).
"""

from real.mcore.versions import check_megatron_version

check_megatron_version()

from real.mcore.internals.execution import detach_execution_hooks, divide_gradients  # noqa: E402
from real.mcore.internals.gradients import (  # noqa: E402
    GradientShard,
    full_gradients,
    full_weights,
    gradient_shards,
)
from real.mcore.internals.layouts import memoize_layouts  # noqa: E402
from real.mcore.internals.lifetime import drop_schedule_state, loosen  # noqa: E402
from real.mcore.internals.nodes import NodeCall, observed_nodes, tell_backward_nodes  # noqa: E402
from real.mcore.internals.optimizer import shard_optimizer  # noqa: E402
from real.mcore.internals.process_state import (  # noqa: E402
    PROCESS_CLASS_ATTRIBUTES,
    PROCESS_GLOBALS,
    SHARE_STORAGE_LOADER,
)
from real.mcore.internals.schedule import communication_stream, join_schedule  # noqa: E402
from real.mcore.internals.state_dict import guard_state_dict  # noqa: E402
from real.mcore.internals.units import (  # noqa: E402
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
from real.mcore.internals.watch import (  # noqa: E402
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
