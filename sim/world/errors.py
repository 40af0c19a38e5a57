"""How a run on fake ranks can fail."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any


class ErrorKind(StrEnum):
    """What ended a run."""

    FAILED = "a rank raised"
    MISMATCH = "collectives do not match"
    DEADLOCK = "deadlock"
    LOST = "a rank lost another"
    DIED = "a process died"
    UNUSED_FAULT = "fault never came up"
    LEFT_OVER = "something was left over"
    INTERRUPTED = "interrupted"
    NOT_STARTED = "a rank did not start"


class MismatchError(RuntimeError):
    """Two ranks call different collectives at the same place of one group's sequence."""


class WorldError(RuntimeError):
    """A rank failed, a collective did not match, or no rank can go on.

    Attributes:
        problem: What went wrong, in one line.
        kind: What that is, for those who decide by it.
        rank: The rank at which it was noticed, or None for a deadlock.
        standing: One line a rank: where it stands.
        findings: What the checks say of the traces up to there, once somebody has asked them.
    """

    findings: Sequence[Any] = ()

    def __init__(
        self, problem: str, *, kind: ErrorKind, rank: int | None, standing: list[str], replay: str
    ) -> None:
        lines = [problem, *(f"  {line}" for line in standing)]
        if replay:
            lines.append(f"Replay: {replay}")
        super().__init__("\n".join(lines))
        self.problem = problem
        self.kind = kind
        self.rank = rank
        self.standing = standing
        self.replay = replay

    def __reduce__(self) -> tuple[Any, ...]:
        return _world_error, (self.problem, self.kind, self.rank, self.standing, self.replay)


def _world_error(
    problem: str, kind: ErrorKind, rank: int | None, standing: list[str], replay: str
) -> WorldError:
    return WorldError(problem, kind=kind, rank=rank, standing=standing, replay=replay)
