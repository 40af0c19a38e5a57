"""The module objects that stand for `transformer_engine`, and their installation."""

import importlib.machinery
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

from sim.te.names import NAMES

# Passes Megatron's version checks as 2.17.1 and still says what it is (a PEP 440 local version).
VERSION = "2.17.1+cpu.standin"
PACKAGE = "transformer_engine"
# The compiled extension of a real installation would otherwise be mixed with the stand-in.
HIDDEN = ("transformer_engine_torch",)
MEGATRON_EXTENSION = "megatron.core.extensions.transformer_engine"


def stand_in_modules() -> dict[str, ModuleType]:
    """Builds new module objects by dotted name, parents first; installs nothing.

    The classes inside are the same at every call, so instances agree between two sets of modules.
    """
    modules = {PACKAGE: _new_module(PACKAGE, {"__version__": VERSION})}
    for suffix, names in NAMES.items():
        dotted = f"{PACKAGE}.{suffix}"
        module = _new_module(dotted, names)
        parent, _, child = dotted.rpartition(".")
        setattr(modules[parent], child, module)
        modules[dotted] = module
    return modules


def _new_module(dotted: str, names: Mapping[str, object]) -> ModuleType:
    module = ModuleType(dotted, "CPU stand-in, not the real Transformer Engine.")
    # Every module counts as a package, so that importing its children looks in sys.modules.
    module.__spec__ = importlib.machinery.ModuleSpec(dotted, loader=None, is_package=True)
    module.__path__ = []
    module.__dict__.update(names)

    def missing(name: str) -> NoReturn:
        raise AttributeError(f"The Transformer Engine stand-in has no {dotted}.{name}.")

    module.__dict__["__getattr__"] = missing
    return module


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """Puts the stand-in in `sys.modules` for the length of the block; yields its modules by name.

    Import Megatron inside the block, and keep the block open while Megatron runs: it imports some
    names when it first needs them. What was there before comes back at the end, also after an
    error. Megatron's modules stay imported and keep the stand-in's classes.

    Raises:
        RuntimeError: Megatron is already imported and has settled on having no Transformer Engine.
    """
    extension = sys.modules.get(MEGATRON_EXTENSION)
    if extension is not None and not getattr(extension, "HAVE_TE", True):
        raise RuntimeError(
            "Cannot install the Transformer Engine stand-in after Megatron was imported without "
            "it; install it before the first import of megatron."
        )
    before = _take_out()
    modules = stand_in_modules()
    sys.modules.update(modules)
    # None in sys.modules makes an import fail, whatever is on disk.
    sys.modules.update(dict.fromkeys(HIDDEN, None))  # type: ignore[arg-type]
    try:
        yield modules
    finally:
        _take_out()
        sys.modules.update(before)


def _take_out() -> dict[str, ModuleType]:
    names = [
        name
        for name in sys.modules
        if name == PACKAGE or name.startswith(f"{PACKAGE}.") or name in HIDDEN
    ]
    return {name: sys.modules.pop(name) for name in names}
