"""What a run on fake ranks can be asked for beside its scenario."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from real.config import Scenario
from real.reference import Reference
from sim.faults import Fault
from sim.session.subject import MFSDP2, Subject

Progress = Callable[[str], None]

BUILD: Final = -1
"""Among the steps in which kernels are recorded: the building of the model, before the first."""


def no_progress(_: str) -> None:
    """Shows nothing."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a scenario is run.

    Attributes:
        subject: What is trained and watched.
        reference: What it is compared with.
        schedule_seed: Chooses the order in which ranks take turns.
        faults: Disturbances of the scenario; stalls need kernels.
        kernel_steps: Steps in which kernels are recorded with the storages that they read and
            write, `BUILD` for what comes before; None records them in all steps.
        records_shapes: Also record the shapes of what kernels read and write.
        require: Rules that must be judged.
        replay: The command that repeats this run, for messages.
    """

    subject: Subject = MFSDP2
    reference: Reference = Reference.DDP
    schedule_seed: int = 0
    faults: Sequence[Fault] = ()
    kernel_steps: Collection[int] | None = ()
    records_shapes: bool = False
    require: Sequence[str] = ()
    replay: str = ""

    @property
    def tree(self) -> Path | None:
        """The Megatron tree to run, put before all others; None for the installed one."""
        return self.subject.tree

    def recorded_steps(self, scenario: Scenario) -> Collection[int]:
        """Returns the steps of a scenario in which kernels are recorded."""
        return range(scenario.train_iters) if self.kernel_steps is None else self.kernel_steps


DEFAULTS: Final = RunOptions()
"""The released MFSDP v2 under our hooks, nothing disturbed, no kernels."""
