"""One seed: another order of the ranks' turns, and other orders of what the devices run.

The trace of a rank says what it did in its own host order. Turns of other ranks are not in it, so
it has to be the same, byte for byte, under every seed. A seed therefore only compares, record by
record, with the first run, and what was judged once needs no second judgement.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from real.config import Scenario
from real.result import judge
from real.trace import MemorySink, Sink, Trace
from real.trace.recorder import Record
from sim.checks import check_traces
from sim.faults import DelayRank, Fault, format_fault, is_stall
from sim.orders.findings import stalls_of, violation_of
from sim.orders.order import Outcome, Stalls, draw_stalls, run_order
from sim.orders.program import Program, build_program
from sim.session.rank import RankPlan
from sim.session.run import run_reference
from sim.session.sinks import traces_of
from sim.session.subject import MFSDP2
from sim.session.world import WorldOptions, make_world, train
from sim.world import ErrorKind, World, WorldError

if TYPE_CHECKING:
    from real.output import JobOutput

_MOST_DELAYS: Final = 3
_SWITCH_CHANCES: Final = (0.0, 0.05, 0.25)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all seeds have in common.

    Attributes:
        scenario: The run.
        faults: Disturbances of every run.
        num_orders: Device orders of one seed.
        kernels_every: Every how many seeds the trace that is compared has kernels.
        has_reference: Whether the first run is compared with the run without FSDP.
    """

    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    num_orders: int = 2
    kernels_every: int = 50
    has_reference: bool = True


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong.

    Attributes:
        seed: The seed, or None when the first run itself failed, before any seed.
        kind: What noticed, and how; failures of one kind are the same to the shrinker.
        problem: What is wrong, for a reader.
    """

    seed: int | None
    kind: str
    problem: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the failure as plain data."""
        return {"seed": self.seed, "kind": self.kind, "problem": self.problem}


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What became of one seed.

    Attributes:
        failure: What went wrong, or None.
        turns: Tells orders of ranks apart.
        orders: Tells device orders apart; one a run of the devices.
    """

    seed: int
    failure: Failure | None
    turns: int = 0
    orders: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The first run, with schedule seed 0 and no delays; what all seeds are compared with.

    Attributes:
        traces: With kernels, one a rank.
        records: Without kernels, one list a rank.
        outputs: Losses, gradients and weights, one entry a rank.
        program: What the devices have to do.
        num_switches: How many turns the run had.
        stalls: Stalls among the faults.
    """

    traces: list[Trace]
    records: list[list[Record]]
    kernel_records: list[list[Record]]
    outputs: list[JobOutput]
    program: Program
    num_switches: int
    stalls: Stalls


class Unequal(Exception):
    """A rank's trace is not what it was in the first run."""


class _ComparingSink:
    """Compares records with expected ones as they come, and keeps nothing."""

    def __init__(self, rank: int, expected: list[Record]) -> None:
        self._rank = rank
        self._expected = expected
        self._at = 0
        self.difference: str | None = None

    def write(self, record: Record) -> None:
        at = self._at
        self._at = at + 1
        if self.difference is not None:
            return
        expected = self._expected[at] if at < len(self._expected) else None
        if record != expected:
            self.difference = (
                f"Record {at} of rank {self._rank} is {_short(record)}, in the first run it is "
                f"{_short(expected)}."
            )

    def close(self) -> None:
        if self.difference is None and self._at != len(self._expected):
            self.difference = (
                f"Rank {self._rank} has {self._at} records, {len(self._expected)} in the first run."
            )


def _short(record: Record | None) -> str:
    if record is None:
        return "not there"
    return " ".join(f"{key}={value}" for key, value in record.items() if key != "seq")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """In which order the ranks of one run take turns.

    Attributes:
        seed: Draws the order.
        delays: Delays of ranks.
        switch_chance: How often a rank gives up its turn where it need not.
    """

    seed: int = 0
    delays: Sequence[DelayRank] = ()
    switch_chance: float = 0.0


FIRST: Final = Turns()
"""Those of the first run."""


def run_once(
    setting: Setting,
    *,
    sinks: Sequence[Sink],
    turns: Turns = FIRST,
    records_kernels: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[JobOutput], World]:
    """Runs all ranks once, without a reference, and returns their outputs and the world.

    Raises:
        WorldError: A rank failed or the ranks do not agree.
    """
    scenario = setting.scenario
    options = WorldOptions(
        schedule_seed=turns.seed,
        faults=[fault for fault in setting.faults if not is_stall(fault)],
        delays=turns.delays,
        switch_chance=turns.switch_chance,
    )
    plan = RankPlan(
        subject=dataclasses.replace(MFSDP2, label="first run"),
        kernel_steps=range(scenario.train_iters) if records_kernels else (),
    )
    world = make_world(scenario.world_size, options)
    return train(world, scenario, plan, sinks=sinks, progress=progress), world


def _world_failure(seed: int | None, error: WorldError) -> Failure:
    kind = str(error.kind)
    if error.kind is ErrorKind.FAILED:
        kind += f" {type(error.__cause__).__name__}"
    lines = [error.problem, *(f"  {line}" for line in error.standing)]
    return Failure(seed=seed, kind=kind, problem="\n".join(lines))


def make_baseline(
    setting: Setting, progress: Callable[[str], None] = lambda _: None
) -> Baseline | Failure:
    """Runs a scenario first, judges it in full and returns it, or what is wrong with it."""
    scenario = setting.scenario
    ranks = range(scenario.world_size)
    with_kernels, without = [MemorySink() for _ in ranks], [MemorySink() for _ in ranks]
    try:
        outputs, _ = run_once(setting, sinks=with_kernels, records_kernels=True, progress=progress)
        again, world = run_once(setting, sinks=without, progress=progress)
    except WorldError as error:
        return _world_failure(None, error)
    traces = traces_of(with_kernels)
    program = build_program(traces)
    stalls, missed = stalls_of(setting.faults, program)
    if missed:
        text = f"Fault '{format_fault(missed[0])}' never came up: nothing matches it."
        return Failure(seed=None, kind=ErrorKind.UNUSED_FAULT, problem=text)
    failure = _judged(setting, outputs, traces) or _numbers_differ(None, again, outputs)
    if failure is not None:
        return failure
    return Baseline(
        traces=traces,
        records=[sink.records for sink in without],
        kernel_records=[sink.records for sink in with_kernels],
        outputs=outputs,
        program=program,
        num_switches=world.num_switches,
        stalls=stalls,
    )


def _judged(setting: Setting, outputs: list[JobOutput], traces: list[Trace]) -> Failure | None:
    violations = check_traces(traces)
    if violations:
        kind = f"check {violations[0].rule}"
        return Failure(seed=None, kind=kind, problem=str(violations[0]))
    if not setting.has_reference:
        return None
    references = run_reference(setting.scenario)
    result = judge(outputs, references, num_records=0, wall_s=0.0, trace=None)
    problems = result.problems()
    return Failure(seed=None, kind="reference", problem=problems[0]) if problems else None


def _numbers_differ(
    seed: int | None, outputs: Sequence[JobOutput], expected: Sequence[JobOutput]
) -> Failure | None:
    for rank, (mine, first) in enumerate(zip(outputs, expected, strict=True)):
        for step, (a, b) in enumerate(zip(mine.steps, first.steps, strict=True)):
            same = a.loss == b.loss and a.grad_norm == b.grad_norm
            if not same or not _equal(a.gradients, b.gradients):
                text = (
                    f"Step {step} of rank {rank} has other numbers than in the first run: loss "
                    f"{a.loss!r} and {b.loss!r}, gradient norm {a.grad_norm!r} and {b.grad_norm!r}."
                )
                return Failure(seed=seed, kind="numbers differ", problem=text)
        if not _equal(mine.weights, first.weights):
            text = f"Rank {rank} ends with other weights than in the first run."
            return Failure(seed=seed, kind="numbers differ", problem=text)
    return None


def _equal(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(v.equal(theirs[k]) for k, v in mine.items())


def draw_delays(seed: int, world_size: int, num_switches: int) -> list[DelayRank]:
    """Draws up to three delays of ranks, anywhere in a run of so many turns."""
    draw = random.Random(f"delays {seed}")
    return [
        DelayRank(
            rank=draw.randrange(world_size),
            at=draw.randrange(num_switches + 1),
            turns=draw.randint(1, num_switches // 2 + 1),
        )
        for _ in range(draw.randint(0, _MOST_DELAYS))
    ]


def run_seed(setting: Setting, baseline: Baseline, seed: int) -> SeedResult:
    """Runs one seed and compares it with the first run."""
    has_kernels = seed % setting.kernels_every == setting.kernels_every - 1
    expected = baseline.kernel_records if has_kernels else baseline.records
    sinks = [_ComparingSink(rank, records) for rank, records in enumerate(expected)]
    turns = Turns(
        seed=seed,
        delays=draw_delays(seed, setting.scenario.world_size, baseline.num_switches),
        switch_chance=random.Random(f"switches {seed}").choice(_SWITCH_CHANCES),
    )
    try:
        outputs, world = run_once(setting, sinks=sinks, turns=turns, records_kernels=has_kernels)
    except WorldError as error:
        return SeedResult(seed=seed, failure=_world_failure(seed, error))
    differences = [sink.difference for sink in sinks if sink.difference is not None]
    failure = None
    if differences:
        failure = Failure(seed=seed, kind="trace differs", problem=differences[0])
    failure = failure or _numbers_differ(seed, outputs, baseline.outputs)
    orders = []
    for number in range(setting.num_orders if failure is None else 0):
        outcome = run_device_order(baseline, seed, number)
        orders.append(outcome.digest)
        violation = violation_of(outcome, baseline.program, baseline.traces)
        if violation is not None:
            text = f"{violation}\n  found in device order {number} of {setting.num_orders}"
            failure = Failure(seed=seed, kind=f"device order {violation.rule}", problem=text)
            break
    return SeedResult(seed=seed, failure=failure, turns=world.order, orders=tuple(orders))


def run_device_order(baseline: Baseline, seed: int, number: int) -> Outcome:
    """Runs one device order of one seed."""
    name = f"{seed}.{number}"
    drawn = draw_stalls(baseline.program, random.Random(f"stalls {name}"))
    stalls = Stalls(
        queues=drawn.queues | baseline.stalls.queues, calls=drawn.calls | baseline.stalls.calls
    )
    return run_order(baseline.program, name, stalls)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps the collector from what stays: forked copies would copy all of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
