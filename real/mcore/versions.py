"""Which Megatron-core is installed, and whether the adapters fit it."""

from __future__ import annotations

from importlib import metadata
from typing import Final

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
