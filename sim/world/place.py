"""Where a rank stands: the collective or message that it is in, and how that is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sim.world.collectives import Call


class Group(Protocol):
    """What names a process group."""

    @property
    def group_name(self) -> str:
        """The name that torch has for the group."""
        ...

    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One collective, or one message, of one group.

    Attributes:
        kind: Name of the operation.
        n: Its number in the group, or among the messages of one pair of ranks.
        group: torch's name of the group.
        ranks: Global ranks of the group.
        unit: FSDP unit on whose behalf it is called, or None.
    """

    kind: str
    n: int
    group: str
    ranks: Sequence[int]
    unit: str | None

    def __str__(self) -> str:
        at = "" if self.unit is None else f" for FSDP unit {self.unit!r}"
        return f"{self.kind} #{self.n} of group {self.group!r} (ranks {list(self.ranks)}){at}"


def place_of(group: Group, n: int, call: Call) -> Place:
    """Returns the place of a group's collective number `n`."""
    return Place(kind=call.kind, n=n, group=group.group_name, ranks=group.ranks, unit=call.unit)


def waits_for(place: Place, missing: Sequence[int]) -> str:
    """Says that a rank is in a collective that others have not come to."""
    if not missing:
        return f"in {place}, to which all have come"
    return f"in {place}, waits for rank {', '.join(map(str, missing))}"


def mismatch(
    place: Place, *, rank: int, mine: dict[str, Any], other_rank: int, theirs: dict[str, Any]
) -> str | None:
    """Returns what is different between two ranks' signatures of one collective, or None."""
    different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if not different:
        return None
    what = "; ".join(f"{key}: expected {theirs.get(key)}, got {mine.get(key)}" for key in different)
    return (
        f"Collective #{place.n} of group {place.group!r} does not match: rank {other_rank} calls "
        f"{theirs['operation']}, rank {rank} calls {mine['operation']} ({what})."
    )
