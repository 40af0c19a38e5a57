"""Cases of group A: hooks that do not fire, or fire at the wrong time."""

from __future__ import annotations

from typing import Final

from sim.cases.base import Case, Shown
from sim.cases.worlds import SMALL, clean, replaced, run_scenario

CASES: Final[tuple[Case, ...]] = (
    Case(
        id="A1",
        source="https://github.com/NVIDIA/Megatron-LM/pull/3797",
        title="The schedule calls parts of a layer, so hooks on the layer never gather it.",
        rules=("I1",),
        unit="decoder.layers.0",
        shown=Shown.SCENARIO,
        defect="MFSDP's own hooks are left to drive the combined schedule",
        twin="hooks on the modules that own parameters",
        faulty=lambda: run_scenario(
            SMALL,
            defect=lambda: replaced(
                "real.hooks.scheduler.UnitScheduler.pre_forward", lambda _: lambda *_: None
            ),
        ),
        correct=lambda: list(clean(SMALL)),
    ),
)
