"""Which Megatron is imported: the tree that a command names goes before all others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real.config import ScenarioError


def check_tree(tree: Path | None) -> None:
    """Refuses a folder without `megatron/core`; None is the installed release.

    Raises:
        ScenarioError: It holds none.
    """
    if tree is not None and not (tree / "megatron" / "core" / "__init__.py").is_file():
        raise ScenarioError(f"Expected a Megatron tree with megatron/core, got {tree}.")


@contextmanager
def first_on_path(tree: Path | None) -> Iterator[None]:
    """Puts a Megatron tree before all others for the length of the block; None changes nothing.

    Raises:
        ScenarioError: It holds no `megatron/core`, or another one is already imported.
    """
    if tree is None:
        yield
        return
    check_tree(tree)
    if "megatron.core" in sys.modules:
        check_origin(tree)
    entry = str(tree.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def check_origin(tree: Path | None) -> None:
    """Refuses a `megatron.core` of another tree, imported earlier or found by other means.

    Raises:
        ScenarioError: It is of another tree.
    """
    if tree is None:
        return
    was_imported = "megatron.core" in sys.modules
    expected = (tree / "megatron" / "core").resolve()
    found = Path(str(importlib.import_module("megatron.core").__file__)).parent.resolve()
    if found != expected:
        when = "already imported" if was_imported else "found first"
        raise ScenarioError(f"Expected megatron.core of {expected}, got {found}, {when}.")
