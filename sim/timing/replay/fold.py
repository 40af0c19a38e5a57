"""Times many ranks by a few: ranks that do the same at the same time are timed once.

[Note: which ranks are the same] Two ranks are of one class when their programs are equal up to the
names of marks, groups and records, and the groups that they use, in order of first use, have
members of the same classes. That is a partition in which every member of a class sees the same
others, so all members of a class have the same times, and one of them is enough. A collective then
waits for one rank of each class among its members.

[Note: more ranks than in the trace] A trace is repeated along its outermost axis, data parallelism.
Groups that shard or replicate units over that axis grow; expert-parallel groups and groups of one
rank stay. A rank's own work stays as it is in the trace, also what it does to its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from real.trace import Trace
from sim.timing.costs.collectives import Placement, is_all_to_all, place
from sim.timing.costs.model import CostModel
from sim.timing.replay.engine import run_program
from sim.timing.replay.lower import AS_RECORDED, Conditions, Place, lower
from sim.timing.replay.program import (
    COLLECTIVE,
    KERNEL,
    CollectiveSpec,
    Op,
    Program,
    RankProgram,
    ReplayError,
)
from sim.timing.replay.timeline import Replay


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A replay that stands for more ranks than it timed.

    Attributes:
        replay: The replay of one rank of each class.
        num_ranks: Ranks that it stands for.
        classes: The ranks of the trace in each class, by the rank that was timed.
    """

    replay: Replay
    num_ranks: int
    classes: dict[int, list[int]]


def replay_folded(
    traces: Sequence[Trace],
    model: CostModel,
    *,
    step: int | None = None,
    conditions: Conditions = AS_RECORDED,
    num_ranks: int | None = None,
) -> Folded:
    """Replays one step, timing ranks that do the same once.

    Args:
        traces: All ranks, in order.
        model: What things cost.
        step: The step; None for the last.
        conditions: What to change beside the costs.
        num_ranks: Ranks to time as; None for those of the trace.

    Raises:
        ReplayError: The trace lacks what a replay needs, or cannot be repeated to so many ranks.
    """
    where = None if num_ranks is None else repeated(traces, model, num_ranks)
    program = lower(traces, model, step=step, conditions=conditions, place=where)
    folded, classes = fold(program)
    timed = [traces[rank] for rank in classes]
    times = run_program(folded)
    return Folded(
        replay=Replay(traces=timed, step=step, model=model, times=times),
        num_ranks=len(traces) if num_ranks is None else num_ranks,
        classes=classes,
    )


# -- repeating ------------------------------------------------------------------------------


def growing_groups(traces: Sequence[Trace]) -> set[str]:
    """Returns the groups that grow with data parallelism [Note: more ranks than in the trace]."""
    sizes: dict[str, int] = {}
    of_units: set[str] = set()
    of_experts: set[str] = set()
    for trace in traces:
        for record in trace.records:
            if record["op"] == "group":
                sizes[record["group"]] = len(record["ranks"])
            elif record["op"] == "collective":
                if record["unit"] is not None:
                    of_units.add(record["group"])
                elif is_all_to_all(record["kind"]):
                    of_experts.add(record["group"])
    larger = {group for group, size in sizes.items() if size > 1}
    return of_units | (larger - of_experts)


def repeated(traces: Sequence[Trace], model: CostModel, num_ranks: int) -> Place:
    """Returns where groups are when the trace is repeated to `num_ranks` ranks.

    Raises:
        ReplayError: `num_ranks` is no multiple of the trace's, or its data-parallel axis has parts.
    """
    world = len(traces)
    if num_ranks < world or num_ranks % world:
        raise ReplayError(f"Expected a multiple of the trace's {world} ranks, got {num_ranks}.")
    if traces[0].scenario.get("num_distributed_optimizer_instances", 1) != 1:
        raise ReplayError(
            "Expected one data-parallel axis to repeat a trace along, got "
            "num-distributed-optimizer-instances above 1."
        )
    growing = growing_groups(traces)
    per_node = model.cluster.ranks_per_node

    def where(group: str, ranks: Sequence[int]) -> Placement:
        if group in growing:
            starts = range(0, num_ranks, world)
            ranks = [start + rank for start in starts for rank in ranks]
        return place(ranks, per_node)

    return where


def unfold(program: Program, growing: set[str], world: int, num_ranks: int) -> Program:
    """Returns the program of all ranks that a repeated trace stands for.

    Args:
        program: Lowered with `repeated`.
        growing: Communicators that span all copies.
        world: Ranks of the trace.
        num_ranks: Ranks of the result.
    """
    copies = num_ranks // world
    specs: list[CollectiveSpec] = []
    places: dict[tuple[int, int], int] = {}
    for index, spec in enumerate(program.collectives):
        if spec.communicator in growing:
            ranks = [copy * world + rank for copy in range(copies) for rank in spec.ranks]
            places.update({(copy, index): len(specs) for copy in range(copies)})
            specs.append(replace(spec, ranks=tuple(ranks)))
            continue
        for copy in range(copies):
            places[copy, index] = len(specs)
            ranks = [copy * world + rank for rank in spec.ranks]
            name = f"{spec.communicator}@{copy}"
            specs.append(replace(spec, communicator=name, ranks=tuple(ranks)))
    programs = [
        RankProgram(
            rank=copy * world + each.rank,
            segments=each.segments,
            streams={
                stream: [_moved(op, places, copy) for op in ops]
                for stream, ops in each.streams.items()
            },
        )
        for copy in range(copies)
        for each in program.ranks
    ]
    return replace(program, ranks=programs, collectives=specs)


def _moved(op: Op, places: dict[tuple[int, int], int], copy: int) -> Op:
    kind, segment, offset, argument, seq = op
    if kind != COLLECTIVE:
        return op
    return (kind, segment, offset, places[copy, argument], seq)


# -- folding --------------------------------------------------------------------------------


def fold(program: Program) -> tuple[Program, dict[int, list[int]]]:
    """Returns a program with one rank of each class, and the classes.

    See [Note: which ranks are the same].
    """
    uses = {each.rank: _communicators(each, program.collectives) for each in program.ranks}
    members = _members(program.collectives)
    classes = _classes(program, uses, members)
    first: dict[int, int] = {}
    by_first: dict[int, list[int]] = {}
    for each in program.ranks:
        representative = first.setdefault(classes[each.rank], each.rank)
        by_first.setdefault(representative, []).append(each.rank)
    if len(by_first) == len(program.ranks):
        return program, by_first
    return _folded(program, uses, members, classes, first), by_first


def _folded(
    program: Program,
    uses: dict[int, list[str]],
    members: dict[str, tuple[int, ...]],
    classes: dict[int, int],
    first: dict[int, int],
) -> Program:
    # A communicator stands for all that have the same classes as members, at the same place among
    # the communicators of each member.
    names: dict[Hashable, str] = {}
    canonical: dict[str, str] = {}
    for communicator, all_ranks in members.items():
        role = tuple(sorted((classes[r], uses[r].index(communicator)) for r in all_ranks))
        canonical[communicator] = names.setdefault(role, communicator)
    specs: list[CollectiveSpec] = []
    places: dict[tuple[str, int], int] = {}
    counts: Counter[str] = Counter()
    renumbered: dict[int, int] = {}
    for index, spec in enumerate(program.collectives):
        key = (canonical[spec.communicator], counts[spec.communicator])
        counts[spec.communicator] += 1
        if key not in places:
            places[key] = len(specs)
            ranks = sorted({first[classes[rank]] for rank in spec.ranks})
            specs.append(replace(spec, communicator=key[0], ranks=tuple(ranks)))
        renumbered[index] = places[key]
    ranks_to_time = set(first.values())
    programs = [
        RankProgram(
            rank=each.rank,
            segments=each.segments,
            streams={
                stream: [
                    (op[0], op[1], op[2], renumbered[op[3]], op[4]) if op[0] == COLLECTIVE else op
                    for op in ops
                ]
                for stream, ops in each.streams.items()
            },
        )
        for each in program.ranks
        if each.rank in ranks_to_time
    ]
    return replace(program, ranks=programs, collectives=specs)


def _communicators(program: RankProgram, specs: Sequence[CollectiveSpec]) -> list[str]:
    """Returns the communicators of a rank in order of first use, stream by stream."""
    used = (
        specs[op[3]].communicator
        for ops in program.streams.values()
        for op in ops
        if op[0] == COLLECTIVE
    )
    return list(dict.fromkeys(used))


def _members(specs: Sequence[CollectiveSpec]) -> dict[str, tuple[int, ...]]:
    return {spec.communicator: spec.ranks for spec in specs}


def _classes(
    program: Program, uses: dict[int, list[str]], members: dict[str, tuple[int, ...]]
) -> dict[int, int]:
    """Refines classes of equal programs until their groups agree too."""
    classes = _numbered(
        {
            each.rank: _signature(each, program.collectives, uses[each.rank])
            for each in program.ranks
        }
    )
    while True:
        finer = _numbered(
            {
                rank: (
                    classes[rank],
                    tuple(tuple(sorted(classes[r] for r in members[c])) for c in uses[rank]),
                )
                for rank in classes
            }
        )
        if len(set(finer.values())) == len(set(classes.values())):
            return finer
        classes = finer


def _numbered(keys: dict[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(key, len(numbers)) for rank, key in keys.items()}


def _signature(
    program: RankProgram, specs: Sequence[CollectiveSpec], communicators: list[str]
) -> Hashable:
    """Returns what is equal for ranks that do the same, whatever their names for things."""
    marks: dict[int, int] = {}
    places = {communicator: place for place, communicator in enumerate(communicators)}
    streams: list[Hashable] = []
    for stream, ops in program.streams.items():
        found: list[Hashable] = []
        for kind, segment, offset, argument, _ in ops:
            if kind == COLLECTIVE:
                spec = specs[argument]
                found.append(
                    (kind, segment, offset, places[spec.communicator], spec.kind, spec.work_ns)
                )
            elif kind == KERNEL:
                found.append((kind, segment, offset, argument))
            else:
                # Only kernels and collectives wait for their launch.
                found.append((kind, marks.setdefault(argument, len(marks))))
        streams.append((stream, tuple(found)))
    segments = tuple(
        (each.host_ns, tuple(marks.setdefault(mark, len(marks)) for mark in each.waits))
        for each in program.segments
    )
    return (segments, tuple(streams))
