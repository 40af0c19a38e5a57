"""The list of all cases, in the order of their ids."""

from __future__ import annotations

import functools
import importlib
from typing import Final

from sim.cases.base import Case

GROUPS: Final = ("a", "b", "c", "d", "e", "f", "g", "h")


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Returns every case, group by group."""
    cases: list[Case] = []
    for group in GROUPS:
        cases += importlib.import_module(f"sim.cases.group_{group}").CASES
    return tuple(sorted(cases, key=lambda case: (case.id[0], int(case.id[1:]))))
