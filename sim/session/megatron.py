"""Brings Megatron up on the fake runtime: stand-ins first, then the import, then the swap."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from real.targets.tree import check_origin, first_on_path
from sim import te
from sim.cuda.shapes import kernel
from sim.swap import owner_of, swapped
from sim.world.state import RankState


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """Stands for `torch.compile` while Megatron is imported."""
    return (lambda function: function) if model is None else model


@contextmanager
def megatron_on_fake_cuda(tree: Path | None = None) -> Iterator[None]:
    """Makes Megatron importable and its CUDA calls harmless for the length of the block.

    Megatron decorates small functions with torch.compile at import. Compiled code would ask for a
    real device and loading the compiler costs more than a whole scenario, so they stay as written.

    Args:
        tree: The folder that holds `megatron/core`; None for the one found first.

    Raises:
        ScenarioError: `megatron.core` is not in the tree, or is already imported from elsewhere.
    """
    with ExitStack() as stack:
        stack.enter_context(first_on_path(tree))
        # Megatron and torch warn about each other's deprecated names, at import and at run time.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(te.installed())
        # Imports make a million objects that all stay: collecting between them finds nothing.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            with swapped(torch, "compile", lambda _: _uncompiled):
                check_origin(tree)
                importlib.import_module("real.mcore.jobs")
        finally:
            if was_collecting:
                gc.enable()
        from sim.cuda import fake_cuda

        stack.enter_context(fake_cuda())
        stack.enter_context(_uncompiled_helpers())
        yield


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keeps the collector from what is imported: it stays, and has not to be looked through."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _uncompiled_helpers() -> Iterator[None]:
    """Puts plain Python where Megatron compiles C++ at first use: not every laptop can."""
    from real.mcore import internals

    with swapped(*owner_of(internals.SHARE_STORAGE_LOADER), lambda _: lambda: share_storage):
        yield


@torch.no_grad()
def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Gives `target`, whose storage was resized to 0, the values of `source`.

    Every view of the storage sees them and no version counter moves, as when memory is shared.
    """
    storage = target.untyped_storage()
    data = source.untyped_storage()
    storage.resize_(data.nbytes())
    with kernel():  # a GPU shares the memory and copies nothing
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(
            torch.empty(0, dtype=torch.uint8).set_(data)
        )


def rank_state() -> list[RankState]:
    """Returns Megatron's and our own process-wide state, one entry a global.

    Megatron must be imported.
    """
    from real.mcore import internals
    from real.trace import recorder

    names = [RankState(owner=recorder, name="_active")]
    for module_name, attributes in internals.PROCESS_GLOBALS.items():
        module = importlib.import_module(module_name)
        names += [
            RankState(owner=module, name=name) for name in attributes or _private_values(module)
        ]
    for class_name, attributes in internals.PROCESS_CLASS_ATTRIBUTES.items():
        module_name, _, name = class_name.rpartition(".")
        owner = getattr(importlib.import_module(module_name), name)
        names += [RankState(owner=owner, name=attribute) for attribute in attributes]
    return names


def _private_values(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    ]
