"""Puts the faults of one rank's collectives into effect, in front of all that the world sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.faults import Fault, LoseCompletion, SkipCollective, SwapCollectives, format_fault

CollectiveFault = SkipCollective | SwapCollectives | LoseCompletion


class Disturber:
    """Applies the faults of one rank's collectives."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._fault_by_index = {
            fault.index: fault
            for fault in faults
            if isinstance(fault, CollectiveFault) and fault.rank == rank
        }
        self._num_collectives = 0
        self._held_back: Callable[[], None] | None = None
        self._is_losing = False

    def holds(self, issue: Callable[[], None]) -> bool:
        """Counts one collective and tells whether a fault keeps it from being issued now.

        Args:
            issue: Issues it later, when it is held back rather than left out.
        """
        fault = self._fault_by_index.get(self._num_collectives)
        self._num_collectives += 1
        if isinstance(fault, LoseCompletion):
            self._is_losing = True
            return False
        if isinstance(fault, SwapCollectives):
            self._held_back = issue
        return fault is not None

    def loses_completion(self) -> bool:
        """Tells whether the collective that is issued now is one whose end gets lost."""
        is_losing, self._is_losing = self._is_losing, False
        return is_losing

    def left_over(self) -> str | None:
        """Says which fault never came up, or None."""
        late = [f for index, f in self._fault_by_index.items() if index >= self._num_collectives]
        if not late:
            return None
        text = format_fault(late[0])
        return f"fault '{text}' never came up in {self._num_collectives} collectives"

    def release(self) -> None:
        """Issues what an earlier fault holds back; called after each collective."""
        if self._held_back is not None:
            issue, self._held_back = self._held_back, None
            issue()
