"""Cases of group D."""

from __future__ import annotations

from typing import Final

from sim.cases.base import Case

CASES: Final[tuple[Case, ...]] = ()
