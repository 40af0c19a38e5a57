"""What a run raised becomes a violation with rule, unit and place, or stays an error."""

from __future__ import annotations

from typing import Any

import pytest

from real.hooks import ContractError
from real.trace import Trace
from sim.checks.errors import violations_of_error
from sim.world import ErrorKind, MismatchError, WorldError


def trace(rank: int, *records: dict[str, Any]) -> Trace:
    numbered = [{"seq": seq, **record} for seq, record in enumerate(records, start=1)]
    return Trace(rank=rank, world_size=2, scenario={}, records=numbered, is_complete=False)


NODE = {
    "op": "node",
    "name": "mlp",
    "direction": "backward",
    "layer": "layer 2",
    "microbatch": 1,
    "chunk": 0,
    "phase": None,
    "stream": 0,
}
NODE_END = {"op": "node_end", "name": "mlp", "direction": "backward"}
HOOK = {"op": "hook", "point": "pre_backward", "module": "b.linear", "unit": "b"}


def all_gather(unit: str | None) -> dict[str, Any]:
    return {
        "op": "collective",
        "stream": 1,
        "group": "0",
        "n": 0,
        "kind": "all_gather",
        "bytes": 8,
        "dtype": "bfloat16",
        "async": False,
        "unit": unit,
        "reads": [],
        "writes": [],
    }


def failed(cause: BaseException, rank: int = 1) -> WorldError:
    error = WorldError(
        f"Rank {rank} raised {type(cause).__name__}: {cause}",
        kind=ErrorKind.MISMATCH if isinstance(cause, MismatchError) else ErrorKind.FAILED,
        rank=rank,
        standing=[],
        replay="",
    )
    error.__cause__ = cause
    return error


def test_an_error_of_the_hooks_brings_its_rule_and_unit() -> None:
    """And the place is where that rank's trace ends, inside the node that did not end."""
    error = failed(ContractError("Expected a gradient, got none.", rule="I6", unit=""))
    (found,) = violations_of_error(error, [trace(0), trace(1, NODE, HOOK)])
    assert (found.rule, found.unit, found.rank) == ("I6", "<root>", 1)
    assert (found.node, found.microbatch) == ("mlp backward of layer 2", 1)
    assert found.hook == "pre_backward of b.linear"
    assert found.seq == 2


def test_a_node_that_ended_is_no_place() -> None:
    """What failed after it, failed between nodes."""
    error = failed(ContractError("Late.", rule="I3", unit="a"))
    (found,) = violations_of_error(error, [trace(0), trace(1, NODE, NODE_END)])
    assert (found.node, found.microbatch) == (None, None)


@pytest.mark.parametrize(
    ("message", "rule", "unit"),
    [
        ("setStorage: ... are out of bounds for storage of size 0", "I1", "a"),
        ("The tensor has elements, but its data is not allocated yet.", "I1", "a"),
        ("Cannot read the weight: its storage was released. Expected 8 bytes.", "I1", "a"),
        ("a variable has been modified by an inplace operation: [8]", "I21", "b"),
        ("Final callbacks can only be installed during backward pass.", "I8", "<root>"),
        ("Missing gradient for FSDP parameter 'weight'.", "I6", "b"),
        ("attempting to assign a gradient with dtype 'float' to a tensor", "I13", "b"),
        ("Cannot use fake CUDA before use_device(); no device in this thread.", "I16", "b"),
        ("Parameter 'w' is already owned by another FsdpModule.", "I15", "b"),
    ],
)
def test_what_torch_and_mfsdp_say_has_a_rule(message: str, rule: str, unit: str) -> None:
    """A weight is named by the buffer that was asked for, the rest by the newest hook."""
    records = (
        {"op": "name", "storage": 7, "unit": "a", "kind": "full weight"},
        HOOK,
        {"op": "kernel", "stream": 0, "name": "mm", "reads": [3, 7], "writes": []},
    )
    (found,) = violations_of_error(failed(RuntimeError(message)), [trace(0), trace(1, *records)])
    assert (found.rule, found.unit) == (rule, unit)


def test_an_unknown_error_is_no_violation() -> None:
    """It is a fault of the bench, and must not count as a catch."""
    assert violations_of_error(failed(KeyError("x")), [trace(0), trace(1, HOOK)]) == []
    interrupted = WorldError(
        "Interrupted.", kind=ErrorKind.INTERRUPTED, rank=None, standing=[], replay=""
    )
    assert violations_of_error(interrupted, [trace(0), trace(1)]) == []


def test_a_mismatch_names_the_unit_of_the_collective() -> None:
    """Ranks that meet in different collectives break the order of one communicator."""
    error = failed(MismatchError("Collective #3 does not match."))
    (found,) = violations_of_error(error, [trace(0), trace(1, all_gather("a"), all_gather("b"))])
    assert (found.rule, found.unit) == ("I11", "b")


def test_a_deadlock_names_who_waits_and_for_which_unit() -> None:
    """The rank that does not come has nothing to say about it."""
    error = WorldError(
        "Deadlock: no rank can go on; waiting: 1.",
        kind=ErrorKind.DEADLOCK,
        rank=None,
        standing=["rank 0: finished", "rank 1: in all_gather #0 of group '0', waits for rank 0"],
        replay="",
    )
    (found,) = violations_of_error(error, [trace(0), trace(1, all_gather("vision"))])
    assert (found.rule, found.rank, found.unit) == ("I12", 1, "vision")
    assert "rank 1 is in all_gather #0" in found.message
