"""What an order of the devices showed, as a violation that names unit, node and both accesses."""

from __future__ import annotations

from collections.abc import Sequence

from real.trace import Trace
from real.trace.read import named_storages, walk
from real.trace.recorder import Record
from sim.checks import Access, Violation
from sim.checks.base import unit_label
from sim.faults import Fault, StallCollective, StallStream, format_fault, is_stall
from sim.orders.order import RELEASED, REUSED, Outcome, Stalls, Surprise, run_order
from sim.orders.program import Code, Program, build_program
from sim.world import ErrorKind, WorldError

_ROLE_OF_COLLECTIVE = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all_single": "communication",
}


def violation_of(outcome: Outcome, program: Program, traces: Sequence[Trace]) -> Violation | None:
    """Returns what is broken, or None."""
    if outcome.surprise is not None:
        return _of_surprise(outcome.surprise, program, traces)
    if outcome.late is not None:
        rank, seq, block = outcome.late
        return _at(
            traces[rank],
            seq,
            rule="I1",
            what=f"{_name(traces[rank], program.blocks[block].number)} is used after its memory "
            "was given back.",
            unit=_unit(traces[rank], program.blocks[block].number),
        )
    if outcome.stuck:
        return _of_stuck(outcome.stuck, program, traces)
    return None


def _of_surprise(found: Surprise, program: Program, traces: Sequence[Trace]) -> Violation:
    trace = traces[found.rank]
    number = program.blocks[found.use.block].number
    is_write = found.use.after != found.use.before
    if found.found == RELEASED:
        rule, how = "I4", "after its memory was released"
    elif found.found == REUSED:
        rule, how = "I10", "after its memory was given to another tensor"
    elif found.found < found.use.before:
        rule, how = "I1", "before what it follows in host order was written"
    else:
        rule, how = "I4", "after it was overwritten"
    other = found.found_seq
    if rule == "I1":
        other = program.writers[found.use.before][1]
    return _at(
        trace,
        found.seq,
        rule=rule,
        what=f"In a legal order of the device, {_name(trace, number)} is "
        f"{'written' if is_write else 'read'} {how}.",
        unit=_unit(trace, number),
        first=_access(trace, other),
        second=_access(trace, found.seq),
    )


def _of_stuck(stuck: Sequence[int], program: Program, traces: Sequence[Trace]) -> Violation:
    places = []
    for queue in stuck:
        rank, stream = program.queues[queue]
        places.append(f"rank {rank} stream {'of its own' if stream is None else stream}")
    rank = program.queues[stuck[0]].rank
    return Violation(
        rule="I11",
        rank=rank,
        message="In a legal order of the devices, these wait for ever: " + ", ".join(places) + ".",
    )


def _at(
    trace: Trace,
    seq: int,
    *,
    rule: str,
    what: str,
    unit: str | None,
    first: Access | None = None,
    second: Access | None = None,
) -> Violation:
    for record, place in walk(trace.records):
        if record["seq"] == seq:
            return Violation(
                rule=rule,
                rank=trace.rank,
                message=what,
                unit=unit,
                node=place.node,
                microbatch=place.microbatch,
                first=first,
                second=second,
                hook=place.hook,
                seq=seq,
            )
    raise ValueError(f"Expected record {seq} in the trace of rank {trace.rank}, got none.")


def _record(trace: Trace, seq: int) -> Record | None:
    return next((record for record in trace.records if record["seq"] == seq), None)


def _access(trace: Trace, seq: int) -> Access | None:
    record = _record(trace, seq)
    if record is None:
        return None
    what = str(record.get("name") or record.get("kind") or record["op"])
    return Access(seq, record["stream"], what)


def _name(trace: Trace, number: int) -> str:
    named = named_storages(trace).get(number)
    return f"storage {number}" if named is None else str(named)


def _unit(trace: Trace, number: int) -> str | None:
    named = named_storages(trace).get(number)
    return None if named is None else unit_label(named.unit)


# -- stalls -----------------------------------------------------------------------------------


def check_stalled(
    traces: Sequence[Trace], faults: Sequence[Fault], num_orders: int = 24
) -> list[Violation]:
    """Runs a trace's devices in some orders under the stalls among the faults.

    Args:
        traces: All ranks, with kernels.
        faults: All faults of the run.
        num_orders: How many orders; the first that shows something ends it.

    Raises:
        WorldError: A stall matches nothing in the trace.
    """
    if not any(map(is_stall, faults)):
        return []
    program = build_program(traces)
    stalls, missed = stalls_of(faults, program)
    if missed:
        problem = f"All ranks finished, but fault '{format_fault(missed[0])}' never came up."
        raise WorldError(
            problem,
            kind=ErrorKind.UNUSED_FAULT,
            rank=missed[0].rank,
            standing=[],
            replay="",
        )
    for number in range(num_orders):
        outcome = run_order(program, f"stalled.{number}", stalls)
        violation = violation_of(outcome, program, traces)
        if violation is not None:
            return [violation]
    return []


def stalls_of(faults: Sequence[Fault], program: Program) -> tuple[Stalls, list[Fault]]:
    """Returns what stalls mean in a program, and those that mean nothing in it."""
    queues: set[int] = set()
    calls: set[tuple[int, int]] = set()
    missed: list[Fault] = []
    for fault in faults:
        if isinstance(fault, StallStream):
            found = _queues_of(fault, program)
            queues.update(found)
        elif isinstance(fault, StallCollective):
            found_calls = _calls_of(fault, program)
            calls.update(found_calls)
            found = [queue for queue, _ in found_calls]
        else:
            continue
        if not found:
            missed.append(fault)
    return Stalls(queues=frozenset(queues), calls=frozenset(calls)), missed


def _queues_of(fault: StallStream, program: Program) -> list[int]:
    mine = {
        queue.stream: index
        for index, queue in enumerate(program.queues)
        if queue.rank == fault.rank and queue.stream is not None and program.ops[index]
    }
    if fault.stream.isdecimal():
        return [index for stream, index in mine.items() if stream == int(fault.stream)]
    if fault.stream == "compute":
        return [index for stream, index in mine.items() if stream == 0]
    return [
        index
        for stream, index in mine.items()
        if stream != 0 and fault.stream in _roles(index, program)
    ]


def _roles(queue: int, program: Program) -> set[str | None]:
    """What a stream is for, as its collectives tell."""
    return {
        _ROLE_OF_COLLECTIVE.get(program.calls[queue, place][1])
        for place, op in enumerate(program.ops[queue])
        if op.code is Code.COLLECTIVE
    }


def _calls_of(fault: StallCollective, program: Program) -> list[tuple[int, int]]:
    """Calls of one rank that match, in the order of their records."""
    calls = sorted(
        (program.ops[queue][place].seq, queue, place)
        for (queue, place), (unit, kind) in program.calls.items()
        if program.queues[queue].rank == fault.rank
        and (fault.unit is None or fault.unit == unit)
        and (fault.kind is None or fault.kind == kind)
    )
    matching = [(queue, place) for _, queue, place in calls]
    return matching if fault.n is None else matching[fault.n : fault.n + 1]
