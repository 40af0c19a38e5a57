"""Brings Megatron up on the fake runtime: stand-ins first, then the import, then the swap."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sim import te
from sim.world.state import RankState


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """Stands for `torch.compile` while Megatron is imported."""
    return (lambda function: function) if model is None else model


@contextmanager
def megatron_on_fake_cuda() -> Iterator[None]:
    """Makes Megatron importable and its CUDA calls harmless for the length of the block.

    Megatron decorates small functions with torch.compile at import. Compiled code would ask for a
    real device and loading the compiler costs more than a whole scenario, so they stay as written.
    """
    with ExitStack() as stack:
        # Megatron and torch warn about each other's deprecated names, at import and at run time.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(te.installed())
        compile_function, torch.compile = torch.compile, _uncompiled
        # Imports make a million objects that all stay: collecting between them finds nothing.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module("real.mcore.jobs")
        finally:
            torch.compile = compile_function
            if was_collecting:
                gc.enable()
        from sim.cuda import fake_cuda

        stack.enter_context(fake_cuda())
        yield


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
