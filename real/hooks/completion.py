"""Counts one unit's gradients per microbatch and says when they are complete."""

from __future__ import annotations

from collections.abc import Mapping

from real.hooks.errors import ContractError


class GradientCountdown:
    """Counts down once per gradient and arms itself again when the last one has come.

    Args:
        unit: The unit's name, for messages.
        fires: Expected gradients per microbatch, by parameter name.
    """

    def __init__(self, unit: str, fires: Mapping[str, int]) -> None:
        self._unit = unit
        self._fires = dict(fires)
        self._left = dict(fires)
        self._num_left = sum(fires.values())

    @property
    def is_started(self) -> bool:
        """Whether some but not all gradients have come."""
        return 0 < self._num_left < sum(self._fires.values())

    def count(self, parameter: str) -> bool:
        """Counts one gradient; returns True when it was the last, and arms the counter again.

        Raises:
            ContractError: The parameter has had all its gradients of this microbatch.
        """
        if self._left[parameter] == 0:
            raise ContractError(
                f"Expected {self._fires[parameter]} gradient(s) of {parameter!r} per microbatch in "
                f"FSDP unit {self._unit or '<root>'!r}, got one more while "
                f"{', '.join(self.missing())} had none.",
                rule="I5",
                unit=self._unit,
            )
        self._left[parameter] -= 1
        self._num_left -= 1
        if self._num_left == 0:
            self.rearm()
            return True
        return False

    def missing(self) -> list[str]:
        """Returns the parameters that have had none of their gradients."""
        return [name for name, left in self._left.items() if left == self._fires[name]]

    def short(self) -> list[str]:
        """Returns the parameters that have had some but not all of their gradients."""
        return [name for name, left in self._left.items() if 0 < left < self._fires[name]]

    def rearm(self) -> None:
        """Starts the next microbatch."""
        self._left = dict(self._fires)
        self._num_left = sum(self._fires.values())
