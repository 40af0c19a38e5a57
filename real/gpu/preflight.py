"""What a machine lacks for a GPU job: driver, GPUs, packages and their versions."""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata, util

import torch

from real.mcore.versions import UnsupportedVersion, check_megatron_version

_OLDEST_TORCH = (2, 11)
_OLDEST_TE = 2


def missing_gpus(wanted: int) -> list[str]:
    """Returns what is wrong with this machine's driver and GPUs, in words."""
    if torch.version.cuda is None:
        return [f"expected torch built for CUDA, got {torch.__version__}"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= wanted:
        return []
    reason = str(said[0].message).split("\n")[0].split(" (Triggered")[0] if said else ""
    driver = f"; torch says of the driver: {reason}" if reason else ""
    return [f"expected {wanted} CUDA GPU(s) on this machine, found {found}{driver}"]


def missing_packages(
    *, has_te: bool, imports_te: bool = False, has_tree: bool = False
) -> list[str]:
    """Returns which packages are missing or of a version that will not do, in words.

    Args:
        has_te: Whether Transformer Engine is needed.
        imports_te: Also import it: its libraries load only then.
        has_tree: Whether a tree stands for the installed Megatron, whatever its version.
    """
    missing = []
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        missing.append(f"expected torch {oldest} or newer, found {torch.__version__}")
    try:
        if not has_tree:
            check_megatron_version()
    except UnsupportedVersion as error:
        missing.append(str(error).rstrip("."))
    if has_te:
        missing += _missing_te(imports=imports_te)
    return missing


def _missing_te(*, imports: bool) -> list[str]:
    if util.find_spec("transformer_engine") is None:
        return ["expected Transformer Engine (extra 'gpu'), found none"]
    try:
        version = metadata.version("transformer-engine-torch")
    except metadata.PackageNotFoundError:
        return ["expected transformer-engine-torch (extra 'gpu'), found only its core"]
    if int(version.split(".")[0]) < _OLDEST_TE:
        return [f"expected Transformer Engine {_OLDEST_TE} or newer, found {version}"]
    if imports:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            return [f"expected Transformer Engine {version} to load, got: {reason}"]
    return []
