"""Runs a program's devices in one legal order and compares what every use of memory finds.

This asks the same question as the vector clocks of `sim.checks` in another way: no clock says which
order is sure; an order is made, and each read must see the write that it saw in host order.

[Note: how an order is drawn]
Hosts and streams are actors; one of them goes on until it cannot. Half of the orders give each
actor a rank of its own and always run the first that can, with a few demotions on the way: that is
good at long delays, as a host far ahead of its devices, or one stream that is late for a whole
step. The others choose anew each time, for a few operations. A stalled stream, and a stalled
collective when all have come, goes on only when nothing else can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sim.orders.program import Code, Late, Program, Use

_LONGEST_BURST: Final = 12
_NO_END: Final = 1 << 60
_MOST_DEMOTIONS: Final = 4
_STALL_CHANCE: Final = 0.7

RELEASED: Final = -1
REUSED: Final = -2


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """What goes on only when nothing else can.

    Attributes:
        queues: Streams.
        calls: Collective operations, by queue and place.
    """

    queues: frozenset[int] = frozenset()
    calls: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """A use of memory that did not find what it found in host order.

    Attributes:
        rank: The rank.
        seq: Record of the use.
        queue: Where it ran.
        use: What it expected.
        found: The write it found; `RELEASED` or `REUSED` when the memory was gone.
        found_seq: Record of what was found.
    """

    rank: int
    seq: int
    queue: int
    use: Use
    found: int
    found_seq: int


@dataclass(kw_only=True)
class Outcome:
    """What one order showed.

    Attributes:
        surprise: The first use that found something else, or None.
        stuck: Queues that wait for each other for ever; empty when all is done.
        late: A use of memory that is gone in any order, or None.
        digest: Different orders have different digests.
        num_steps: Operations that were run.
    """

    surprise: Surprise | None = None
    stuck: list[int] = field(default_factory=list)
    late: Late | None = None
    digest: int = 0
    num_steps: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing was found."""
        return self.surprise is None and not self.stuck and self.late is None


def draw_stalls(program: Program, order: random.Random) -> Stalls:
    """Draws up to three streams and two collectives to stall."""
    if order.random() > _STALL_CHANCE:
        return Stalls()
    streams = [i for i, queue in enumerate(program.queues) if queue.stream is not None]
    calls = list(program.calls)
    queues = order.sample(streams, min(len(streams), order.randint(0, 3)))
    chosen = order.sample(calls, min(len(calls), order.randint(0, 2)))
    return Stalls(queues=frozenset(queues), calls=frozenset(chosen))


def run_order(program: Program, seed: int | str, stalls: Stalls | None = None) -> Outcome:
    """Runs one order.

    Args:
        program: What there is to do.
        seed: Chooses the order.
        stalls: What is stalled; None draws it from the seed as well.
    """
    order = random.Random(f"order {seed}")
    if program.late:
        return Outcome(late=program.late[0])
    return _Devices(program, order, draw_stalls(program, order) if stalls is None else stalls).run()


class _Devices:
    """All devices and hosts of one order.

    Actors are numbered: the queues first, then one host a rank.
    """

    def __init__(self, program: Program, order: random.Random, stalls: Stalls) -> None:
        self._program = program
        self._order = order
        self._stalled_calls = stalls.calls
        num_queues = len(program.queues)
        self._num_queues = num_queues
        self._done = [0] * num_queues
        self._issued = [0] * num_queues
        self._steps_done = [0] * len(program.hosts)
        self._holds = dict.fromkeys(program.blocks, 0)
        self._holder: dict[int, int] = {}
        self._taken: set[int] = set()
        self._grants: dict[tuple[int, int], int | None] = {}
        self._arrived: list[list[int]] = [[] for _ in program.meetings]
        self._came: set[tuple[int, int]] = set()
        self._late_calls: list[int] = []
        self._waiters: list[list[tuple[int, int]]] = [[] for _ in range(num_queues)]
        self._outcome = Outcome()

        hosts = range(num_queues, num_queues + len(program.hosts))
        self._is_ready = [False] * num_queues + [True] * len(hosts)
        self._ready = list(hosts)  # may hold some that are not ready any more
        places = list(range(len(self._is_ready)))
        order.shuffle(places)
        self._place = places  # who goes first in a ranked order: the least
        self._last_place = len(places)
        self._is_ranked = order.random() < 0.5
        self._stalled = stalls.queues
        most = program.num_ops + sum(map(len, program.hosts))
        self._demotions = sorted(
            order.randrange(most + 1) for _ in range(order.randint(0, _MOST_DEMOTIONS))
        )

    def run(self) -> Outcome:
        """Runs until all is done, or something is found."""
        outcome = self._outcome
        while outcome.surprise is None:
            actor = self._choose()
            if actor is None:
                break
            burst = self._burst()
            if actor < self._num_queues:
                count = self._run_queue(actor, burst)
            else:
                count = self._run_host(actor - self._num_queues, burst)
            outcome.num_steps += count
            outcome.digest = hash((outcome.digest, actor, count))
            while self._demotions and outcome.num_steps >= self._demotions[0]:
                self._demotions.pop(0)
                self._place[actor] = self._last_place
                self._last_place += 1
        if outcome.surprise is None:
            outcome.stuck = [
                queue for queue, ops in enumerate(self._program.ops) if self._done[queue] < len(ops)
            ]
        return outcome

    def _burst(self) -> int:
        if not self._is_ranked:
            return self._order.randint(1, _LONGEST_BURST)
        if self._demotions:
            return max(1, self._demotions[0] - self._outcome.num_steps)
        return _NO_END

    def _choose(self) -> int | None:
        ready = self._ready = [actor for actor in self._ready if self._is_ready[actor]]
        able = ready
        if self._stalled:
            able = [actor for actor in ready if actor not in self._stalled]
        if not able and self._late_calls:
            queue = self._late_calls.pop(0)
            self._make_ready(queue)
            return queue
        able = able or ready
        if not able:
            return None
        if self._is_ranked:
            return min(able, key=self._place.__getitem__)
        return able[self._order.randrange(len(able))]

    def _make_ready(self, actor: int) -> None:
        if not self._is_ready[actor]:
            self._is_ready[actor] = True
            if actor not in self._ready:
                self._ready.append(actor)

    # -- hosts ------------------------------------------------------------------------------

    def _run_host(self, host: int, most: int) -> int:
        steps = self._program.hosts[host]
        first = at = self._steps_done[host]
        actor = self._num_queues + host
        while at < len(steps) and at - first < most:
            step = steps[at]
            blocked = next((w for w in step.waits if self._done[w[0]] < w[1]), None)
            if blocked is not None:
                self._waiters[blocked[0]].append((blocked[1], actor))
                self._is_ready[actor] = False
                break
            queue = step.queue
            if queue is not None:
                if step.asks:
                    self._grants[queue, self._issued[queue]] = self._grant(step.asks)
                was = self._issued[queue]
                self._issued[queue] = was + step.gets
            at += 1
            # A queue that had work before is ready already, or blocked by something else.
            if queue is not None and was == self._done[queue]:
                self._make_ready(queue)
                if self._is_ranked and self._precedes(queue, actor):
                    break
        self._steps_done[host] = at
        if at == len(steps):
            self._is_ready[actor] = False
        return at - first

    def _precedes(self, queue: int, actor: int) -> bool:
        """Whether a queue goes before the host that filled it."""
        if queue in self._stalled:
            return False
        return self._place[queue] < self._place[actor]

    def _grant(self, blocks: Sequence[int]) -> int | None:
        """Chooses which freed block an allocation gets, if it does not get fresh memory."""
        free = [
            block
            for block in blocks
            if block not in self._taken
            and all(self._done[q] >= n for q, n in self._program.blocks[block].held_by)
        ]
        choice = self._order.randrange(len(free) + 1)
        if choice == len(free):
            return None
        self._taken.add(free[choice])
        return free[choice]

    # -- queues -----------------------------------------------------------------------------

    def _run_queue(self, queue: int, most: int) -> int:
        ops = self._program.ops[queue]
        done = self._done
        first = at = done[queue]
        end = min(self._issued[queue], at + most)
        while at < end:
            op = ops[at]
            code = op.code
            if code == Code.WAIT:
                if done[op.queue] < op.least:
                    self._waiters[op.queue].append((op.least, queue))
                    self._is_ready[queue] = False
                    break
            elif code == Code.COLLECTIVE:
                if (queue, at) not in self._came and not self._arrive(queue, at):
                    break
                if not self._use(queue, op.uses):
                    break
            elif code == Code.REUSE:
                block = self._grants.get((queue, at))
                if block is not None:
                    self._holds[block] = REUSED
                    self._holder[block] = op.seq
            elif code == Code.RELEASE:
                for use in op.uses:
                    self._holds[use.block] = RELEASED
                    self._holder[use.block] = op.seq
            elif not self._use(queue, op.uses):
                break
            at += 1
            done[queue] = at
            if self._waiters[queue] and self._wake(queue) and self._is_ranked:
                break
        if at == self._issued[queue]:
            self._is_ready[queue] = False
        return at - first

    def _wake(self, queue: int) -> bool:
        """Makes everybody ready that waited for what the queue has done by now."""
        done = self._done[queue]
        waiters = self._waiters[queue]
        ready = [actor for count, actor in waiters if count <= done]
        if ready:
            self._waiters[queue] = [waiter for waiter in waiters if waiter[0] > done]
            for actor in ready:
                self._make_ready(actor)
        return bool(ready)

    def _arrive(self, queue: int, at: int) -> bool:
        """Comes to a collective; returns whether it may end at once."""
        op = self._program.ops[queue][at]
        arrived = self._arrived[op.meeting]
        if not self._use(queue, op.uses, is_start=True):
            return False
        arrived.append(queue)
        self._came.add((queue, at))
        if len(arrived) < self._program.meetings[op.meeting]:
            self._is_ready[queue] = False
            return False
        for other in arrived:
            if (other, self._done[other]) in self._stalled_calls:
                self._late_calls.append(other)
                self._is_ready[other] = False
            else:
                self._make_ready(other)
        return self._is_ready[queue] and not self._is_ranked

    def _use(self, queue: int, uses: Sequence[Use], *, is_start: bool = False) -> bool:
        """Reads and writes; returns whether every use found what it found in host order."""
        holds = self._holds
        for use in uses:
            block, before, after, _ = use
            if holds[block] != before:
                self._outcome.surprise = self._surprise(queue, use, holds[block])
                return False
            if after != before and not is_start:
                holds[block] = after
        return True

    def _surprise(self, queue: int, use: Use, found: int) -> Surprise:
        gone = self._holder.get(use.block, -1)
        return Surprise(
            rank=self._program.queues[queue].rank,
            seq=use.seq,
            queue=queue,
            use=use,
            found=found,
            found_seq=gone if found < 0 else self._program.writers[found][1],
        )
