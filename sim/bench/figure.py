"""One measured number and what it stands beside."""

from __future__ import annotations

from typing import TypedDict


class Figure(TypedDict):
    """One measured number and what it stands beside.

    Attributes:
        name: What was measured.
        value: The number.
        unit: Its unit.
        peer: What it is compared with, measured in the same run.
        peer_value: The number of that, in the same unit.
        ratio: `value` over `peer_value`.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float


def make_figure(name: str, value: float, unit: str, *, peer: str, peer_value: float) -> Figure:
    """Returns a figure with its ratio, numbers to four digits."""
    return Figure(
        name=name,
        value=_four_digits(value),
        unit=unit,
        peer=peer,
        peer_value=_four_digits(peer_value),
        ratio=_four_digits(value / peer_value),
    )


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
