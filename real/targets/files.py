"""A target in a file of the user's: `path/to/adapter.py:ClassName`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.targets.errors import TargetError

if TYPE_CHECKING:
    from real.targets.base import Target


def is_file_name(name: str) -> bool:
    """Tells `adapter.py:ClassName`, or a failed try at it, from a name of the table."""
    return name.endswith(".py") or ".py:" in name


def check_file_name(name: str) -> None:
    """Refuses a name without a class, or of a file that is not there; runs nothing of it.

    Raises:
        TargetError: The name is not `FILE.py:CLASS`, or there is no such file.
    """
    path, class_name = _split(name)
    if not class_name.isidentifier():
        raise TargetError(f"Expected as target FILE.py:CLASS, got {name!r}.")
    if not path.is_file():
        raise TargetError(f"Expected a file with target {class_name}, got none at {path}.")


def load_target(name: str, protocol: type) -> Target:
    """Returns an instance of the class in the file, which is run once a process.

    Args:
        name: As `check_file_name` takes it.
        protocol: What the instance has to have: each public name of this class.

    Raises:
        TargetError: The file cannot be imported or has no such class, or the class has a
            constructor with arguments or lacks something.
    """
    path, class_name = _split(name)
    target_type = getattr(_module(path.resolve()), class_name, None)
    if not isinstance(target_type, type):
        raise TargetError(f"Expected a class {class_name} in {path}, got none.")
    if not _takes_nothing(target_type):
        raise TargetError(f"Expected {name} to take no arguments, got a constructor that does.")
    target: Any = target_type()
    lacking = [member for member in _members(protocol) if not _has(target, member, protocol)]
    if lacking:
        raise TargetError(
            f"Expected {name} to have what a target has, got one without {', '.join(lacking)}."
        )
    return target  # type: ignore[no-any-return]


def _split(name: str) -> tuple[Path, str]:
    path, _, class_name = name.rpartition(":")
    return Path(path), class_name


@cache
def _module(path: Path) -> Any:
    """Runs a file as a module. Ranks share it, as they share all that is watched."""
    spec = importlib.util.spec_from_file_location(f"target_of_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TargetError(f"Expected a Python file, got {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[spec.name]
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise TargetError(f"Expected {path} to import, got {text}.") from error
    return module


def _takes_nothing(target_type: type) -> bool:
    try:
        inspect.signature(target_type).bind()
    except TypeError:
        return False
    return True


def _members(protocol: type) -> list[str]:
    return [member for member in vars(protocol) if not member.startswith("_")]


def _has(target: object, member: str, protocol: type) -> bool:
    value = getattr(target, member, None)
    return callable(value) or (value is not None and isinstance(vars(protocol)[member], property))
