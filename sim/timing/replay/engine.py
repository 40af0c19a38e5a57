"""Runs programs in time on SimPy: a host process and one process a stream, for every rank.

[Note: sharing a device] Kernels of several streams share the device evenly, and all of them are
slower by a factor while a collective is on it. A device therefore counts service: nanoseconds of
work that each running kernel has had. A kernel ends when its service is its own time. Its process
sleeps until the earliest moment at which that can be, and sleeps again if it was slowed meanwhile.

[Note: sharing links] A collective starts when all its ranks are there and the one before it on its
communicator is done. It goes as fast as its most loaded port lets it; ports are the links of each
rank, by tier.

Times are whole nanoseconds. What happens at the same time happens in the order in which it was
scheduled, and ranks and streams start in order, so equal programs give equal times.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import simpy
from simpy.events import Event

from sim.timing.replay.program import (
    COLLECTIVE,
    KERNEL,
    RECORD,
    CollectiveSpec,
    Op,
    Program,
    ReplayError,
    Segment,
)

_HALF: Final = 0.5  # less work than this is done

Process = Generator[Event, Any, None]


@dataclass(kw_only=True, slots=True)
class StreamTimes:
    """When the operations of one stream ran, in the order of its program.

    Attributes:
        starts: When each was reached and issued; for a collective, when this rank was there.
        ends: When each was done.
    """

    starts: list[int]
    ends: list[int]


@dataclass(kw_only=True, slots=True)
class RankTimes:
    """When one rank did what.

    Attributes:
        bases: Start of each host segment.
        host_ends: When the host was done with the work of each segment.
        streams: By stream.
        end: When the host's last segment and its waits ended.
    """

    bases: list[int]
    host_ends: list[int]
    streams: dict[int, StreamTimes]
    end: int = -1


@dataclass(kw_only=True, slots=True)
class Times:
    """What a replay found.

    Attributes:
        program: What was run.
        ranks: In the order of the program.
        begins: When the bytes of each collective began to move.
        ends: When each collective ended.
        end: When everything had ended.
    """

    program: Program
    ranks: list[RankTimes]
    begins: list[int]
    ends: list[int]
    end: int


class _Device:
    """One GPU and the host that feeds it [Note: sharing a device]."""

    __slots__ = (
        "bases", "busy", "factor", "host_ends", "marks", "num_collectives", "rate", "segment_begun",
        "service", "targets", "updated",
    )  # fmt: skip

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.marks: dict[int, Any] = {}
        self.bases: list[int] = []
        self.host_ends: list[int] = []
        self.segment_begun: Event | None = None
        self.targets: list[float] = []
        self.num_collectives = 0
        self.service = 0.0
        self.busy = 0
        self.updated = 0
        self.rate = 1.0

    def advance(self, now: int) -> None:
        elapsed = now - self.updated
        if elapsed:
            if self.targets:
                self.service += elapsed * self.rate
                self.busy += elapsed
            self.updated = now

    def enter(self, now: int, ns: int) -> float:
        """Adds a kernel and returns the service at which it ends."""
        if self.targets:
            self.advance(now)
            target = self.service + ns
            self.targets.append(target)
            self.set_rate()
        else:
            self.updated = now
            target = self.service + ns
            self.targets.append(target)
            self.rate = 1.0 / self.factor if self.num_collectives else 1.0
        return target

    def leave(self, target: float) -> None:
        """Takes a kernel away that has ended."""
        self.targets.remove(target)
        if self.targets:
            self.set_rate()

    def set_rate(self) -> None:
        num = len(self.targets)
        rate = 1.0 / num if num > 1 else 1.0
        self.rate = rate / self.factor if self.num_collectives else rate

    def earliest(self, target: float) -> int:
        """Returns how long a kernel needs at least: kernels that end before it share until then."""
        left = target - self.service
        if len(self.targets) > 1:
            service = self.service
            left = sum(min(other - service, left) for other in self.targets)
        return int(left + _HALF)


class _Transfer:
    """One collective on its way."""

    __slots__ = (
        "began", "busy", "done", "following", "index", "is_ready", "left", "load", "missing",
        "ports", "ranks", "since", "spec", "version",
    )  # fmt: skip

    def __init__(self, index: int, spec: CollectiveSpec, ranks: list[_Device], done: Event) -> None:
        self.index = index
        self.spec = spec
        self.ranks = ranks
        self.missing = len(ranks)
        self.done = done
        self.following: _Transfer | None = None
        self.is_ready = False  # whether nothing on the communicator is before it
        self.ports: list[dict[_Transfer, None]] = []
        self.left = float(spec.work_ns)
        self.load = 1
        self.since = 0
        self.busy: list[int] = []
        self.version = 0
        self.began = -1


class Engine:
    """One replay.

    Args:
        program: What to run.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        # `_now` is `now` without the call; the property is half of the cost of reading it.
        self._env: Any = simpy.Environment()
        factor = program.compute_slowdown
        self._lost = 1.0 - 1.0 / program.communication_slowdown
        self._devices = {each.rank: _Device(factor) for each in program.ranks}
        self._ports: dict[tuple[str, int], dict[_Transfer, None]] = {}
        self._transfers = self._make_transfers()
        self._begins = [-1] * len(self._transfers)
        self._ends = [-1] * len(self._transfers)

    def run(self) -> Times:
        """Runs everything to its end.

        Raises:
            ReplayError: Something waits for what never comes.
        """
        env = self._env
        ranks = []
        with _gc_disabled():
            for each in self._program.ranks:
                device = self._devices[each.rank]
                times = RankTimes(bases=device.bases, host_ends=device.host_ends, streams={})
                env.process(self._host(device, each.segments, times))
                for stream, ops in each.streams.items():
                    spans = times.streams[stream] = StreamTimes(starts=[], ends=[])
                    env.process(self._stream(device, ops, spans.starts, spans.ends))
                ranks.append(times)
            env.run()
        self._check_finished(ranks)
        return Times(
            program=self._program,
            ranks=ranks,
            begins=self._begins,
            ends=self._ends,
            end=int(env.now),
        )

    # -- processes --------------------------------------------------------------------------

    def _host(self, device: _Device, segments: list[Segment], times: RankTimes) -> Process:
        env, marks = self._env, device.marks
        for segment in segments:
            device.bases.append(env._now)
            begun, device.segment_begun = device.segment_begun, None
            if begun is not None:
                begun.succeed()
            if segment.host_ns:
                yield env.timeout(segment.host_ns)
            device.host_ends.append(env._now)
            for mark in segment.waits:
                state = marks.get(mark)
                if state is not True:
                    if state is None:
                        state = marks[mark] = Event(env)
                    yield state
        times.end = env._now

    def _stream(
        self, device: _Device, ops: list[Op], starts: list[int], ends: list[int]
    ) -> Process:
        """Runs one stream in order.

        Records and waits need not wait until the host has issued them: what a record lets go on was
        issued after it.
        """
        env, marks, bases = self._env, device.marks, device.bases
        timeout, transfers = env.timeout, self._transfers
        is_slowed = device.factor != 1.0
        for kind, segment, offset, argument, _ in ops:
            if kind <= COLLECTIVE:
                while segment >= len(bases):
                    if device.segment_begun is None:
                        device.segment_begun = Event(env)
                    yield device.segment_begun
                late = bases[segment] + offset - env._now
                if late > 0:
                    yield timeout(late)
                now = env._now
                starts.append(now)
                if kind == KERNEL:
                    target = device.enter(now, argument)
                    wait = argument if len(device.targets) == 1 else device.earliest(target)
                    while True:
                        yield timeout(wait)
                        device.advance(env._now)
                        if target - device.service < _HALF:
                            break
                        wait = device.earliest(target)
                    device.leave(target)
                else:
                    transfer = transfers[argument]
                    if is_slowed:
                        device.advance(now)
                        device.num_collectives += 1
                        device.set_rate()
                    transfer.missing -= 1
                    if transfer.missing == 0 and transfer.is_ready:
                        self._begin(transfer)
                    yield transfer.done
            else:
                starts.append(env._now)
                state = marks.get(argument)
                if kind == RECORD:
                    marks[argument] = True
                    if state is not None and state is not True:
                        state.succeed()
                elif state is not True:
                    if state is None:
                        state = marks[argument] = Event(env)
                    yield state
            ends.append(env._now)

    # -- collectives ------------------------------------------------------------------------

    def _make_transfers(self) -> list[_Transfer]:
        transfers = []
        newest: dict[str, _Transfer] = {}
        for index, spec in enumerate(self._program.collectives):
            devices = [self._devices[rank] for rank in spec.ranks]
            transfer = _Transfer(index, spec, devices, Event(self._env))
            transfer.ports = [
                self._ports.setdefault((tier, rank), {})
                for tier in spec.tiers
                for rank in spec.ranks
            ]
            before = newest.get(spec.communicator)
            if before is None:
                transfer.is_ready = True
            else:
                before.following = transfer
            newest[spec.communicator] = transfer
            transfers.append(transfer)
        return transfers

    def _begin(self, transfer: _Transfer) -> None:
        now = self._env._now
        self._begins[transfer.index] = now
        transfer.since = now
        self._note_busy(transfer, now)
        others: dict[_Transfer, None] = {}
        load = 1
        for port in transfer.ports:
            if port:
                others.update(port)
                load = max(load, len(port) + 1)
            port[transfer] = None
        transfer.load = load
        for other in others:
            self._rebalance(other)
        self._schedule(transfer)

    def _rebalance(self, transfer: _Transfer) -> None:
        load = max(map(len, transfer.ports))
        if load != transfer.load:
            self._progress(transfer)
            transfer.load = load
            self._schedule(transfer)

    def _schedule(self, transfer: _Transfer) -> None:
        version = transfer.version = transfer.version + 1
        wake = self._env.timeout(int(transfer.left * transfer.load + _HALF))

        def check(_: Event) -> None:
            if transfer.version == version:
                self._check(transfer)

        assert wake.callbacks is not None
        wake.callbacks.append(check)

    def _progress(self, transfer: _Transfer) -> None:
        now = self._env._now
        elapsed: float = now - transfer.since
        if self._lost:
            before = transfer.busy
            self._note_busy(transfer, now)
            slowed = max(map(int.__sub__, transfer.busy, before))
            elapsed -= slowed * self._lost
        transfer.left -= elapsed / transfer.load
        transfer.since = now

    def _note_busy(self, transfer: _Transfer, now: int) -> None:
        if self._lost:
            for device in transfer.ranks:
                device.advance(now)
            transfer.busy = [device.busy for device in transfer.ranks]

    def _check(self, transfer: _Transfer) -> None:
        self._progress(transfer)
        if transfer.left >= _HALF:
            self._schedule(transfer)
            return
        now = self._env._now
        self._ends[transfer.index] = now
        others: dict[_Transfer, None] = {}
        for port in transfer.ports:
            del port[transfer]
            if port:
                others.update(port)
        for other in others:
            self._rebalance(other)
        if self._program.compute_slowdown != 1.0:
            for device in transfer.ranks:
                device.advance(now)
                device.num_collectives -= 1
                device.set_rate()
        transfer.done.succeed()
        following = transfer.following
        if following is not None:
            following.is_ready = True
            if following.missing == 0:
                self._begin(following)

    # -- the end ----------------------------------------------------------------------------

    def _check_finished(self, ranks: list[RankTimes]) -> None:
        for program, times in zip(self._program.ranks, ranks, strict=True):
            for stream, ops in program.streams.items():
                done = len(times.streams[stream].ends)
                if done < len(ops):
                    what = self._describe(ops[done])
                    raise ReplayError(
                        f"Rank {program.rank}, stream {stream}: waits for {what}, which never "
                        "comes; `python -m sim check` judges the order of a trace."
                    )
            if times.end < 0:
                raise ReplayError(f"Rank {program.rank}: its host waits for what never comes.")

    def _describe(self, op: Op) -> str:
        kind, _, _, argument, seq = op
        if kind == COLLECTIVE:
            spec = self._program.collectives[argument]
            return f"the {spec.kind} of group {spec.communicator} (record {seq})"
        return f"its turn at record {seq}" if kind == KERNEL else f"an event (record {seq})"


def run_program(program: Program) -> Times:
    """Runs a program and returns when everything happened."""
    return Engine(program).run()


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Nothing here is collected meanwhile, and looking for it takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
