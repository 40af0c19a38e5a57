"""All ranks in one process: a thread each, one running at a time.

[Note: when ranks switch]
A rank runs until it has to wait: for a collective whose other ranks have not arrived, for a
message, or for its own end; with a `switch_chance` it may also stop before a collective of its own.
The next rank is drawn from those that can run, with a generator of its own, so the order depends on
the schedule seed alone and not on the operating system.

[Note: how a run ends early]
The first failure is kept and every rank that gets its turn after it raises `_Abort` where it waits,
so its `finally` blocks run, one rank at a time. Nobody wakes anybody for that: once there is a
failure, a rank that waits counts as one that can run.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import torch

from sim.faults import DelayRank, Fault, format_fault
from sim.world.errors import ErrorKind, MismatchError, WorldError
from sim.world.guard import Guard, guarded
from sim.world.place import Place
from sim.world.state import RankState, StateSet, snapshot, torch_state

_set_thread_isolation_mode: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
_MAX_IDLE_POLLS: Final = 1000
_GRACE_S: Final = 1.0
"""How long an interrupted run may take to reach a point where ranks switch."""


class LeftOver(Protocol):
    """Something that should be gone at the end of a run."""

    def left_over(self) -> str | None:
        """Says what never happened, or None."""
        ...


class _Abort(BaseException):
    """Unwinds a rank after another one failed; not an Exception, so nobody swallows it."""


class _Status(Enum):
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"


class _Rank:
    def __init__(self, index: int, state: StateSet, faults: Sequence[Fault]) -> None:
        self.index = index
        self.state = state
        self.faults = faults
        self.status = _Status.READY
        self.place: Place | None = None
        self.waiting: Callable[[], str] | None = None
        self.raised: str | None = None
        self.handling: str | None = None
        self.is_started = False
        self.is_unwinding = False
        self.thread: threading.Thread | None = None
        self.result: Any = None
        self.transport: Any = None
        self.baton = threading.Lock()
        self.baton.acquire()

    def standing(self) -> str:
        """Says where the rank stands now."""
        if self.raised is not None:
            return f"raised {self.raised}{self._after()}"
        if self.status is _Status.FINISHED:
            return "finished"
        if self.waiting is not None:
            handling = f", while it handles {self.handling}" if self.handling else ""
            return self.waiting() + handling
        if not self.is_started:
            return "not started"
        return f"running{self._after()}"

    def _after(self) -> str:
        return "" if self.place is None else f", last in {self.place}"


class Host(Protocol):
    """What a process group needs from a world."""

    def transport_of(self, rank: int) -> Any:
        """Returns what moves the data of one rank's collectives."""
        ...


class _Current(threading.local):
    host: Host | None = None
    rank: int | None = None


_current = _Current()


def current_world() -> tuple[Host, int]:
    """Returns the world and the rank of the calling thread.

    Raises:
        RuntimeError: The thread is no rank of a world.
    """
    if _current.host is None or _current.rank is None:
        raise RuntimeError("Cannot ask for the current world outside a rank; use World.run().")
    return _current.host, _current.rank


def enter_world(host: Host | None, rank: int | None) -> None:
    """Makes the calling thread a rank of a world; None and None takes it out again."""
    _current.host, _current.rank = host, rank


@dataclass(frozen=True, kw_only=True)
class _Failure:
    kind: ErrorKind
    rank: int | None
    problem: str
    cause: BaseException | None
    standing: list[str]


class World:
    """Runs one callable on every rank.

    Args:
        num_ranks: Number of ranks, at least 1.
        schedule_seed: Chooses the order in which ranks take turns and nothing else.
        state: Globals that each rank has for itself, beside torch's.
        faults: Disturbances to inject; stalls are the device's and change nothing here. One that
            never comes up is an error.
        delays: Further delays of ranks, which need not come up.
        switch_chance: How often a rank gives up its turn before a collective or message of its own,
            where it need not wait: 0 never, 1 always.
        replay: The command that repeats this run, for messages.

    Attributes:
        rendezvous: What ranks have left for other ranks, by a key of the transport's.
        num_switches: How many times a rank got its turn.
        order: A number that tells different orders of turns apart.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        schedule_seed: int = 0,
        state: Sequence[RankState] = (),
        faults: Sequence[Fault] = (),
        delays: Sequence[DelayRank] = (),
        switch_chance: float = 0.0,
        replay: str = "",
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"Expected at least 1 rank, got {num_ranks}.")
        for fault in faults:
            if fault.rank not in range(num_ranks):
                raise ValueError(f"Expected a fault of rank 0 to {num_ranks - 1}, got {fault}.")
        self.num_ranks = num_ranks
        self.faults = tuple(faults)
        self.rendezvous: dict[tuple[Any, ...], Any] = {}
        self.num_switches = 0
        self.order = 0
        self._num_idle_polls = 0
        self._order = random.Random(schedule_seed)
        self._delays = [f for f in faults if isinstance(f, DelayRank)]
        self._late = set(self._delays)
        self._delays += delays
        self._guard: Guard | None = None
        self._switch_chance = switch_chance
        self._state = [*torch_state(), *state]
        self._replay = replay
        self._ranks: list[_Rank] = []
        self._failure: _Failure | None = None
        self._ended = threading.Event()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Calls `body(rank)` on every rank and returns the results in rank order.

        A world runs once.

        Raises:
            WorldError: A rank raised, a collective did not match or all ranks wait; the cause is
                chained. No rank is left running.
            KeyboardInterrupt: All ranks were unwound first.
        """
        if self._ranks:
            raise RuntimeError("Cannot run a world twice; make another one.")
        outside = snapshot(self._state)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the operations are tiny: more threads only add hand-overs
        _set_thread_isolation_mode(True)
        # What sits in a cycle would go when the process has made so many objects, on any rank: the
        # place of its release in a trace would depend on the turns of all ranks.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            self._ranks = [
                _Rank(i, StateSet(self._state), self.faults) for i in range(self.num_ranks)
            ]
            with guarded(self.faults, self.num_ranks) as self._guard:
                self._run_threads(body)
        finally:
            if was_collecting:
                gc.enable()
            outside.install()
            torch.set_num_threads(num_threads)
            _set_thread_isolation_mode(False)
        results = [rank.result for rank in self._ranks]
        if self._failure is None:
            self._check_left_over()
        for rank in self._ranks:
            rank.state.clear()
        if self._failure is not None:
            failure = self._failure
            raise WorldError(
                failure.problem,
                kind=failure.kind,
                rank=failure.rank,
                standing=failure.standing,
                replay=self._replay,
            ) from failure.cause
        return results

    # -- what a transport calls, in the thread of a rank --------------------------------------

    def wait_until(
        self, rank: int, is_done: Callable[[], bool], standing: Callable[[], str]
    ) -> None:
        """Lets other ranks run until `is_done()`; `standing` says what this rank waits for.

        Must be called by the thread of `rank`. Whoever makes `is_done` true calls `wake`.
        """
        self._raise_if_aborted()
        while not is_done():
            self._yield(self._ranks[rank], _Status.WAITING, standing)

    def give_turn(self, rank: int, standing: Callable[[], str]) -> None:
        """Lets other ranks run once: for a rank that polls instead of waiting."""
        others = [r for r in self._ranks if r.status is _Status.READY]
        self._num_idle_polls = 0 if others else self._num_idle_polls + 1
        if self._num_idle_polls > _MAX_IDLE_POLLS:
            self._ranks[rank].waiting = standing
            problem = "Deadlock: a rank polls for what no other rank will do."
            self._fail(ErrorKind.DEADLOCK, None, problem)
        self._raise_if_aborted()
        self._yield(self._ranks[rank], _Status.READY, standing)

    def wake(self, ranks: Sequence[int]) -> None:
        """Tells waiting ranks to look again."""
        for index in ranks:
            if self._ranks[index].status is _Status.WAITING:
                self._ranks[index].status = _Status.READY

    def note(self, rank: int, place: Place) -> None:
        """Notes the newest collective or message of a rank."""
        self._raise_if_aborted()
        me = self._ranks[rank]
        me.place = place
        error = sys.exception()
        me.handling = None if error is None else f"{type(error).__name__}: {error}"
        if self._switch_chance and self._order.random() < self._switch_chance:
            self._yield(me, _Status.READY, lambda: f"about to call {place}")

    def mismatch(self, rank: int, problem: str) -> MismatchError:
        """Ends the run, and returns the error for the rank to raise; catching it is no help."""
        error = MismatchError(problem)
        self._ranks[rank].raised = type(error).__name__
        self._fail(ErrorKind.MISMATCH, rank, problem, error)
        return error

    def transport_of(self, rank: int) -> Any:
        """Returns what moves the data of one rank's collectives, made at first use."""
        from sim.world.in_process import InProcess

        me = self._ranks[rank]
        if me.transport is None:
            me.transport = InProcess(self, rank, self.faults)
        return me.transport

    def standing(self) -> list[str]:
        """Returns one line a rank: where it stands."""
        return [f"rank {rank.index}: {rank.standing()}" for rank in self._ranks]

    # -- turns --------------------------------------------------------------------------------

    def _yield(self, me: _Rank, status: _Status, standing: Callable[[], str]) -> None:
        me.waiting = standing
        me.state.save()
        me.status = status
        self._hand_over()
        me.baton.acquire()
        me.status = _Status.RUNNING
        self._raise_if_aborted()
        me.state.install()
        me.waiting = None

    def _hand_over(self) -> None:
        """Gives the turn to the next rank; when there is none, all have ended."""
        ready = self._ready()
        if not ready and any(rank.status is _Status.WAITING for rank in self._ranks):
            waiting = [str(r.index) for r in self._ranks if r.status is _Status.WAITING]
            problem = f"Deadlock: no rank can go on; waiting: {', '.join(waiting)}."
            self._fail(ErrorKind.DEADLOCK, None, problem)
            ready = self._ready()
        if ready:
            self.num_switches += 1
            ready = self._without_delayed(ready) if self._delays else ready
            chosen = ready[0] if len(ready) == 1 else self._order.choice(ready)
            self.order = hash((self.order, chosen.index))
            chosen.status = _Status.RUNNING
            chosen.baton.release()

    def _without_delayed(self, ready: list[_Rank]) -> list[_Rank]:
        """Leaves out the ranks that a delay holds back, unless nobody else can run."""
        now = self.num_switches - 1
        held = [d for d in self._delays if d.at <= now < d.at + d.turns]
        self._late.difference_update(held)
        others = [rank for rank in ready if all(rank.index != d.rank for d in held)]
        return others or ready

    def _ready(self) -> list[_Rank]:
        # [Note: how a run ends early]
        can_run = (_Status.READY,) if self._failure is None else (_Status.READY, _Status.WAITING)
        return [rank for rank in self._ranks if rank.status in can_run]

    def _run_rank(self, me: _Rank, body: Callable[[int], Any]) -> None:
        me.baton.acquire()
        try:
            self._raise_if_aborted()
            me.is_started = True
            enter_world(self, me.index)
            me.state.install()
            me.result = body(me.index)
            me.status = _Status.FINISHED
            me.state.save()
        except _Abort:
            me.status = _Status.FAILED
        except BaseException as error:  # noqa: BLE001 - whatever ends a rank ends the run
            me.status = _Status.FAILED
            me.raised = type(error).__name__
            self._fail(ErrorKind.FAILED, me.index, describe(me.index, error), error)
        finally:
            me.is_unwinding = True
            enter_world(None, None)
            self._hand_over()

    def _raise_if_aborted(self) -> None:
        if self._failure is not None:
            raise _Abort

    def _fail(
        self,
        kind: ErrorKind,
        rank: int | None,
        problem: str,
        cause: BaseException | None = None,
    ) -> None:
        if self._failure is None:  # what happens while the others unwind is a consequence
            self._failure = _Failure(
                kind=kind, rank=rank, problem=problem, cause=cause, standing=self.standing()
            )

    def _check_left_over(self) -> None:
        faults: list[LeftOver] = [r.transport.disturber for r in self._ranks if r.transport]
        faults += [self._guard] if self._guard is not None else []
        self._fail_of(ErrorKind.LEFT_OVER, self.rendezvous.values())
        self._fail_of(ErrorKind.UNUSED_FAULT, faults)
        for delay in sorted(self._late, key=str):
            text = f"fault '{format_fault(delay)}' never came up in {self.num_switches} switches"
            self._fail(ErrorKind.UNUSED_FAULT, None, f"All ranks finished, but {text}.")

    def _fail_of(self, kind: ErrorKind, items: Iterable[LeftOver]) -> None:
        for item in items:
            text = item.left_over()
            if text is not None:
                self._fail(kind, None, f"All ranks finished, but {text}.")

    # -- threads ------------------------------------------------------------------------------

    def _run_threads(self, body: Callable[[int], Any]) -> None:
        """Runs all ranks to their end, also when the calling thread is interrupted.

        A thread of its own starts the ranks, so that an interrupt finds either none or all of them.
        """
        starter = threading.Thread(target=self._start_all, args=(body,), name="world")
        try:
            starter.start()
            # Not by join(): an interrupted join takes a running thread for a finished one. A signal
            # may arrive in another thread, so look now and then.
            while not self._ended.wait(_GRACE_S):
                pass
        except BaseException:
            self._fail(ErrorKind.INTERRUPTED, None, "Interrupted.")
            if starter.ident is not None:
                self._unwind()
            raise
        starter.join()

    def _start_all(self, body: Callable[[int], Any]) -> None:
        started = []
        try:
            self._raise_if_aborted()
            for rank in self._ranks:
                rank.thread = threading.Thread(
                    target=self._run_rank, args=(rank, body), name=f"rank{rank.index}"
                )
                rank.thread.start()
                started.append(rank)
        except _Abort:
            pass  # interrupted before the first thread
        except RuntimeError as error:  # the operating system gives no more threads
            for rank in self._ranks[len(started) :]:
                rank.status = _Status.FAILED
            problem = f"Cannot start rank {len(started)}: {error}."
            self._fail(ErrorKind.NOT_STARTED, None, problem, error)
        if started:
            self._hand_over()
        for rank in started:
            assert rank.thread is not None
            rank.thread.join()
        self._ended.set()

    def _unwind(self) -> None:
        """Waits for all ranks to end; stops one that does not come to a switch in time."""
        has_ended = False
        while not has_ended:
            try:
                has_ended = self._ended.wait(_GRACE_S)
                for rank in self._ranks:
                    if rank.status is _Status.RUNNING and not rank.is_unwinding:
                        _raise_in(rank.thread, _Abort)
            except KeyboardInterrupt:
                continue  # the first one is on its way


def run_as_rank(host: Host, rank: int, state: Sequence[RankState], body: Callable[[], Any]) -> Any:
    """Runs `body` as the only rank of this process, with values of its own for all globals.

    A thread of its own gives it registries of its own in torch's C++ half, as `World.run` does.
    """
    outside = snapshot(state)
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        enter_world(host, rank)
        try:
            outcome.append(body())
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    _set_thread_isolation_mode(True)
    try:
        StateSet(state).install()
        thread = threading.Thread(target=run, name=f"rank{rank}")
        thread.start()
        thread.join()
    finally:
        outside.install()
        _set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return outcome[0]


def _raise_in(thread: threading.Thread | None, error: type[BaseException]) -> None:
    if thread is not None and thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(error)
        )


def describe(rank: int, error: BaseException) -> str:
    """Says in one line how a rank failed."""
    if isinstance(error, MismatchError):
        return str(error)
    return f"Rank {rank} raised {type(error).__name__}: {error}"
