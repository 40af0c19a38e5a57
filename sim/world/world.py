"""All ranks in one process: a thread each, one running at a time.

[Note: when ranks switch]
A rank runs until it has to wait: for a collective whose other ranks have not arrived, for a message,
or for its own end. The next rank is drawn from those that can run, with a generator of its own, so
the order depends on the schedule seed alone and not on the operating system.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from sim.world.state import RankState, StateSet, snapshot, torch_state

if TYPE_CHECKING:
    from sim.world.faults import Fault


class WorldError(RuntimeError):
    """A rank failed, a collective did not match, or no rank can go on.

    Attributes:
        rank: The rank at which it was noticed, or None for a deadlock.
        standing: One line a rank: where it stands.
    """

    def __init__(self, problem: str, *, rank: int | None, standing: list[str], replay: str) -> None:
        lines = [problem, *(f"  {line}" for line in standing)]
        if replay:
            lines.append(f"Replay: {replay}")
        super().__init__("\n".join(lines))
        self.problem = problem
        self.rank = rank
        self.standing = standing


class MismatchError(RuntimeError):
    """Two ranks call different collectives at the same place of one group's sequence."""


class _Abort(BaseException):
    """Unwinds a rank after another one failed; not an Exception, so nobody swallows it."""


class _Status(Enum):
    READY = "ready"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"


class _Rank:
    def __init__(self, index: int, state: StateSet) -> None:
        self.index = index
        self.state = state
        self.status = _Status.READY
        self.standing = "not started"
        self.result: Any = None
        self.transport: Any = None
        self.baton = threading.Lock()
        self.baton.acquire()


class _Current(threading.local):
    world: World | None = None
    rank: int | None = None


_current = _Current()


def current_world() -> tuple[World, int]:
    """Returns the world and the rank of the calling thread.

    Raises:
        RuntimeError: The thread is no rank of a world.
    """
    if _current.world is None or _current.rank is None:
        raise RuntimeError("Cannot ask for the current world outside a rank; use World.run().")
    return _current.world, _current.rank


class World:
    """Runs one callable on every rank.

    Args:
        num_ranks: Number of ranks, at least 1.
        schedule_seed: Chooses the order in which ranks take turns and nothing else.
        state: Globals that each rank has for itself, beside torch's.
        faults: Disturbances to inject.
        replay: The command that repeats this run, for messages.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        schedule_seed: int = 0,
        state: Sequence[RankState] = (),
        faults: Sequence[Fault] = (),
        replay: str = "",
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"Expected at least 1 rank, got {num_ranks}.")
        self.num_ranks = num_ranks
        self.faults = tuple(faults)
        self.rendezvous: dict[tuple[Any, ...], Any] = {}
        self.num_switches = 0
        self._order = random.Random(schedule_seed)
        self._state = [*torch_state(), *state]
        self._replay = replay
        self._ranks: list[_Rank] = []
        self._failure: tuple[int | None, str, BaseException | None] | None = None
        self._finished = threading.Event()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Calls `body(rank)` on every rank and returns the results in rank order.

        Raises:
            WorldError: A rank raised, a collective did not match or all ranks wait; the cause is
                chained. No rank is left running.
        """
        outside = snapshot(self._state)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the operations are tiny: more threads only add hand-overs
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            self._ranks = [_Rank(i, StateSet(self._state)) for i in range(self.num_ranks)]
            threads = [
                threading.Thread(target=self._run_rank, args=(rank, body), name=f"rank{rank.index}")
                for rank in self._ranks
            ]
            for thread in threads:
                thread.start()
            self._hand_over()
            self._finished.wait()
            for thread in threads:
                thread.join()
        finally:
            outside.install()
            torch.set_num_threads(num_threads)
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
        if self._failure is not None:
            rank, problem, cause = self._failure
            raise WorldError(
                problem, rank=rank, standing=self._final_standing, replay=self._replay
            ) from cause
        return [rank.result for rank in self._ranks]

    def wait_until(self, rank: int, is_done: Callable[[], bool], standing: str) -> None:
        """Lets other ranks run until `is_done()`; `standing` says what this rank waits for.

        Must be called by the thread of `rank`. Whoever makes `is_done` true calls `wake`.
        """
        me = self._ranks[rank]
        self._raise_if_aborted()
        while not is_done():
            me.status = _Status.WAITING
            me.standing = standing
            me.state.save()
            self._hand_over()
            me.baton.acquire()
            self._raise_if_aborted()
            me.state.install()
        me.standing = "running"

    def wake(self, ranks: Sequence[int]) -> None:
        """Tells waiting ranks to look again."""
        for index in ranks:
            if self._ranks[index].status is _Status.WAITING:
                self._ranks[index].status = _Status.READY

    def note(self, rank: int, standing: str) -> None:
        """Says where a rank stands that is about to raise."""
        self._ranks[rank].standing = standing

    def transport_of(self, rank: int) -> Any:
        """Returns what moves the data of one rank's collectives, made at first use."""
        from sim.world.process_group import InProcess

        me = self._ranks[rank]
        if me.transport is None:
            me.transport = InProcess(self, rank)
        return me.transport

    def standing(self) -> list[str]:
        """Returns one line a rank: where it stands."""
        return [f"rank {rank.index}: {rank.standing}" for rank in self._ranks]

    def _raise_if_aborted(self) -> None:
        if self._failure is not None:
            raise _Abort

    def _run_rank(self, me: _Rank, body: Callable[[int], Any]) -> None:
        me.baton.acquire()
        try:
            self._raise_if_aborted()
            _current.world, _current.rank = self, me.index
            me.state.install()
            me.standing = "running"
            me.result = body(me.index)
            me.status, me.standing = _Status.FINISHED, "finished"
        except _Abort:
            me.status = _Status.FAILED
        except BaseException as error:
            me.status = _Status.FAILED
            if not isinstance(error, MismatchError):
                me.standing = f"raised {type(error).__name__}"
            self._fail(me.index, _describe(me.index, error), error)
        finally:
            _current.world = _current.rank = None
            self._hand_over()

    def _fail(self, rank: int | None, problem: str, cause: BaseException | None) -> None:
        if self._failure is not None:
            return  # what happens while the others unwind is a consequence
        self._failure = (rank, problem, cause)
        self._final_standing = self.standing()
        for other in self._ranks:
            if other.status is _Status.WAITING:
                other.status = _Status.READY

    def _hand_over(self) -> None:
        """Gives the turn to the next rank, or ends the run."""
        ready = [rank for rank in self._ranks if rank.status is _Status.READY]
        if not ready and any(rank.status is _Status.WAITING for rank in self._ranks):
            self._fail(None, self._deadlock_text(), None)
            ready = [rank for rank in self._ranks if rank.status is _Status.READY]
        if not ready:
            self._finished.set()
            return
        self.num_switches += 1
        chosen = ready[0] if len(ready) == 1 else self._order.choice(ready)
        chosen.baton.release()

    def _deadlock_text(self) -> str:
        waiting = [str(r.index) for r in self._ranks if r.status is _Status.WAITING]
        return f"Deadlock: no rank can go on; waiting: {', '.join(waiting)}."


def _describe(rank: int, error: BaseException) -> str:
    if isinstance(error, MismatchError):
        return str(error)
    return f"Rank {rank} raised {type(error).__name__}: {error}"
