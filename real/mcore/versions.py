"""Which Megatron-core is installed, and whether the adapters fit it."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, Final

SUPPORTED_SERIES: Final = "0.19"


class UnsupportedVersion(RuntimeError):
    """The installed Megatron-core has other private names than the adapters know."""


def check_megatron_version() -> str:
    """Returns the installed version.

    Raises:
        UnsupportedVersion: Megatron-core is missing or of another series.
    """
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or not version.startswith(f"{SUPPORTED_SERIES}."):
        got = "none" if version is None else version
        raise UnsupportedVersion(
            f"Expected megatron-core {SUPPORTED_SERIES}.* (tested with 0.19.2), got {got}."
        )
    return version


_MFSDP: Final = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental"
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    _MFSDP: ("DBuffer", "Flat", "Partial", "Placements", "Replicate", "fully_shard"),
    f"{_MFSDP}.layout": ("GlobalLayout.build",),
    f"{_MFSDP}.module": (
        "FsdpModule._lazy_init_context",
        "FsdpModule._unshard_parameter_groups",
        "FsdpModule._reshard_parameter_groups",
        "FsdpModule._reduce_gradient_groups",
    ),
    f"{_MFSDP}.parameter_group": ("FsdpParameterGroup",),
    "megatron.core.pipeline_parallel.combined_1f1b": ("find_megatron_fsdp",),
    "megatron.core.models.common.model_chunk_schedule_plan": (
        "TransformerLayerSchedulePlan.set_fsdp_reshard_hooks",
    ),
}
"""What the adapters of our hooks touch, by module."""


def missing_names(needed: dict[str, tuple[str, ...]] = _NEEDED) -> list[str]:
    """Returns which names the imported Megatron lacks, whatever it calls its version.

    Args:
        needed: Names by module, with the class in front where it has them; those of our hooks.
    """
    return [
        f"{module}.{name}"
        for module, names in needed.items()
        for name in names
        if not _has(module, name)
    ]


def _has(module: str, name: str) -> bool:
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner is not None


def imported_version() -> str:
    """Returns the version that the imported tree gives itself."""
    return str(importlib.import_module("megatron.core").__version__)


def imported_path() -> str:
    """Returns the folder that holds the imported `megatron`."""
    core = importlib.import_module("megatron.core")
    return str(core.__path__[0]).removesuffix("/megatron/core")
