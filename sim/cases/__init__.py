"""Public fault cases of this integration, each with its fault and its correct twin."""

from sim.cases.base import Case, Shown, Verdict, judge
from sim.cases.table import all_cases

__all__ = ["Case", "Shown", "Verdict", "all_cases", "judge"]
