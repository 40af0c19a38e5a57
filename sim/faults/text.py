"""Faults as a person writes them: `drop-wait rank=1 unit=decoder.layers.0`."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

from sim.faults import values
from sim.faults.values import ROLES, Fault, hook_points

KINDS: Final[dict[str, type[Any]]] = {
    "skip-collective": values.SkipCollective,
    "swap-collectives": values.SwapCollectives,
    "lose-completion": values.LoseCompletion,
    "drop-wait": values.DropWait,
    "swap-hooks": values.SwapHooks,
    "lose-callback": values.LoseCallback,
    "free-early": values.FreeEarly,
    "double-install": values.DoubleInstall,
    "delay-rank": values.DelayRank,
    "stall-stream": values.StallStream,
    "stall-collective": values.StallCollective,
}
"""All faults by the name that a person writes."""

_ROOT: Final = "<root>"


class FaultError(ValueError):
    """A fault that cannot be understood; the message says what was expected and what was got."""


def describe_kinds() -> str:
    """Returns one line a fault: its name and its keys, optional ones in brackets."""
    lines = []
    for name, kind in KINDS.items():
        keys = [
            spec.name if _is_required(spec) else f"[{spec.name}]"
            for spec in dataclasses.fields(kind)
        ]
        lines.append(f"{name} {' '.join(keys)}")
    return "\n".join(lines)


def parse_fault(text: str, world_size: int | None = None) -> Fault:
    """Reads one fault.

    Args:
        text: A name and `key=value` words.
        world_size: Number of ranks, to check the fault's rank.

    Raises:
        FaultError: The text is no fault; one line.
    """
    name, *words = text.split() or [""]
    kind = KINDS.get(name)
    if kind is None:
        raise FaultError(
            f"Expected a fault among {', '.join(KINDS)}; got {name!r}.{_hint(name, KINDS)}"
        )
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in specs:
            raise FaultError(
                f"Expected words {', '.join(f'{key}=...' for key in specs)} after {name}, "
                f"got {word!r}.{_hint(key, specs)}"
            )
        if key in found:
            raise FaultError(f"Expected {key} once in {text!r}, got it twice.")
        found[key] = _value(name, key, value, is_number="int" in str(specs[key].type))
    missing = [key for key, spec in specs.items() if _is_required(spec) and key not in found]
    if missing:
        raise FaultError(f"Expected {', '.join(f'{key}=...' for key in missing)} in {text!r}.")
    if world_size is not None and found["rank"] >= world_size:
        raise FaultError(
            f"Expected rank=0 to rank={world_size - 1} in {text!r}, got {found['rank']}."
        )
    fault: Fault = kind(**found)
    return fault


def format_fault(fault: Fault) -> str:
    """Returns the text that `parse_fault` reads as this fault."""
    [name] = [name for name, kind in KINDS.items() if type(fault) is kind]
    words = [name]
    for spec in dataclasses.fields(fault):  # type: ignore[arg-type] # every fault is a dataclass
        value = getattr(fault, spec.name)
        if _is_required(spec) or value != spec.default:
            words.append(f"{spec.name}={_ROOT if value == '' else value}")
    return " ".join(words)


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING


def _value(kind: str, key: str, text: str, *, is_number: bool) -> Any:
    if is_number:
        if re.fullmatch(r"[0-9]+", text) is None:
            raise FaultError(f"Expected a number of 0 or more for {key} of {kind}, got {text!r}.")
        return int(text)
    if not text:
        raise FaultError(f"Expected a value for {key} of {kind}, got none.")
    if key == "point" and text not in (points := hook_points()):
        raise FaultError(
            f"Expected point among {', '.join(points)}; got {text!r}.{_hint(text, points)}"
        )
    if key in ("stream", "on") and text not in ROLES and re.fullmatch(r"[0-9]+", text) is None:
        raise FaultError(
            f"Expected {key} among {', '.join(ROLES)}, or a stream's number; "
            f"got {text!r}.{_hint(text, ROLES)}"
        )
    return "" if text == _ROOT else text


def _hint(got: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(got, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
