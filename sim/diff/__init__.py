"""Compares two runs record by record, or by what both modes must agree in."""

from sim.diff.allowances import ALLOWANCES, Allowance
from sim.diff.canonical import CanonicalTrace, Line, canonical, canonical_text
from sim.diff.compare import Comparison, Difference, compare, side_by_side

__all__ = [
    "ALLOWANCES",
    "Allowance",
    "CanonicalTrace",
    "Comparison",
    "Difference",
    "Line",
    "canonical",
    "canonical_text",
    "compare",
    "side_by_side",
]
