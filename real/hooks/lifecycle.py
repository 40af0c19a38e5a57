"""The life of one unit's full parameters, as a transition table.

[Note: two intervals]
Under combined 1F1B the forward of one microbatch and the backward of another are in flight in the
same unit, so one phase per unit cannot say who still needs the parameters. A unit has two
intervals, forward and backward, each open or closed; parameters are released when the last open one
closes. Using a unit opens its interval (a prefetch opens it early), the schedule's forward release
closes the forward one, and the last gradient closes the backward one.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from real.hooks.errors import ContractError
from real.trace import OpKind, active_recorder


class UnitPhase(Enum):
    """Which intervals of a unit are open."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "forward and backward"


class UnitEvent(Enum):
    """What happens to a unit."""

    FORWARD_USE = "use in forward"
    FORWARD_RELEASE = "release after forward"
    BACKWARD_USE = "use in backward"
    GRADIENT = "gradient"
    BACKWARD_END = "end of backward"


_P, _E = UnitPhase, UnitEvent

TRANSITIONS: Final[dict[tuple[UnitPhase, UnitEvent], UnitPhase]] = {
    (_P.RESTING, _E.FORWARD_USE): _P.FORWARD,
    (_P.RESTING, _E.BACKWARD_USE): _P.BACKWARD,
    (_P.RESTING, _E.FORWARD_RELEASE): _P.RESTING,  # releasing twice is allowed
    (_P.FORWARD, _E.FORWARD_USE): _P.FORWARD,
    (_P.FORWARD, _E.BACKWARD_USE): _P.BOTH,
    (_P.FORWARD, _E.FORWARD_RELEASE): _P.RESTING,
    (_P.BACKWARD, _E.FORWARD_USE): _P.BOTH,
    (_P.BACKWARD, _E.BACKWARD_USE): _P.BACKWARD,
    (_P.BACKWARD, _E.FORWARD_RELEASE): _P.BACKWARD,
    (_P.BACKWARD, _E.GRADIENT): _P.BACKWARD,
    (_P.BACKWARD, _E.BACKWARD_END): _P.RESTING,
    (_P.BOTH, _E.FORWARD_USE): _P.BOTH,
    (_P.BOTH, _E.BACKWARD_USE): _P.BOTH,
    (_P.BOTH, _E.FORWARD_RELEASE): _P.BACKWARD,
    (_P.BOTH, _E.GRADIENT): _P.BOTH,
    (_P.BOTH, _E.BACKWARD_END): _P.FORWARD,
}
"""Legal steps; what is missing is illegal: a gradient, or an end, of a backward not begun."""


class IllegalStep(ContractError):
    """A step that the transition table does not have."""


class UnitLifecycle:
    """The phase of one unit.

    Args:
        unit: The unit's name, for messages.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self.phase = UnitPhase.RESTING

    def step(self, event: UnitEvent, cause: str = "") -> UnitPhase:
        """Makes one step and returns the new phase.

        Args:
            event: What happens.
            cause: What triggered it, for the message.

        Raises:
            IllegalStep: The table has no such step; the phase stays as it was.
        """
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            by = f" by {cause}" if cause else ""
            raise IllegalStep(
                f"Cannot take step '{event.value}'{by} of FSDP unit {self._unit or '<root>'!r}: "
                f"its phase is '{self.phase.value}'.",
                rule="I18",
                unit=self._unit,
            )
        recorder = active_recorder()
        if after is not self.phase and recorder.is_recording:
            recorder.record(
                OpKind.PHASE,
                unit=self._unit,
                event=event.value,
                before=self.phase.value,
                after=after.value,
            )
        self.phase = after
        return after
