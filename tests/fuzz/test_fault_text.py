"""Faults as text: every one can be written and read, and a bad one gets one clear line."""

from __future__ import annotations

import dataclasses

import pytest

from sim.faults import (
    DropWait,
    FaultError,
    FreeEarly,
    LoseCallback,
    format_fault,
    hook_points,
    parse_fault,
)
from sim.faults.text import KINDS

FULL = {"n": 3, "index": 4, "at": 5, "turns": 6, "unit": "decoder.layers.0", "module": "a.b"}
FULL |= {"stream": "compute", "on": "all_gather", "point": "pre_backward", "kind": "all_gather"}


@pytest.mark.parametrize("name", KINDS)
def test_every_fault_can_be_read_back(name: str) -> None:
    kind = KINDS[name]
    keys = [spec.name for spec in dataclasses.fields(kind)]
    fault = kind(rank=1, **{key: FULL[key] for key in keys if key != "rank"})
    assert parse_fault(format_fault(fault)) == fault
    assert format_fault(fault).startswith(f"{name} rank=1")


def test_what_is_not_said_has_its_default() -> None:
    assert parse_fault("drop-wait rank=1 unit=decoder.layers.0") == DropWait(
        rank=1, unit="decoder.layers.0"
    )
    assert parse_fault("lose-callback rank=0") == LoseCallback(rank=0, n=0, point="post_gradient")


def test_every_hook_point_of_the_scheduler_can_be_named() -> None:
    """Also those at the ends of nodes; what others call on the scheduler is no hook."""
    assert set(hook_points()) == {
        "pre_forward",
        "pre_backward",
        "post_forward",
        "post_gradient",
        "end_of_first_use",
        "end_backward",
        "release_forward",
        "release_backward",
    }
    fault = parse_fault("lose-callback rank=1 point=end_backward")
    assert fault == LoseCallback(rank=1, point="end_backward")


def test_the_root_has_a_name() -> None:
    """Its own is empty, and a word without a value is a slip."""
    fault = parse_fault("free-early rank=0 unit=<root>")
    assert fault == FreeEarly(rank=0, unit="")
    assert format_fault(fault) == "free-early rank=0 unit=<root>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expected a fault among skip-collective, "),
        ("drop-waits rank=1", "got 'drop-waits'. Did you mean 'drop-wait'?"),
        ("nonsense rank=1", "got 'nonsense'."),
        ("drop-wait rnk=1", "got 'rnk=1'. Did you mean 'rank'?"),
        ("drop-wait rank", "Expected words rank=..., n=..., "),
        ("drop-wait rank=1 rank=2", "Expected rank once in 'drop-wait rank=1 rank=2', "),
        ("drop-wait unit=a", "Expected rank=... in 'drop-wait unit=a'."),
        ("skip-collective rank=1", "Expected index=... in 'skip-collective rank=1'."),
        ("drop-wait rank=-1", "Expected a number of 0 or more for rank of drop-wait, got '-1'."),
        ("drop-wait rank=1 n=all", "Expected a number of 0 or more for n of drop-wait, got 'all'."),
        ("drop-wait rank=1 unit=", "Expected a value for unit of drop-wait, got none."),
        ("free-early rank=1 point=pre_foward", "Did you mean 'pre_forward'?"),
        ("drop-wait rank=1 on=allgather", "Did you mean 'all_gather'?"),
        ("drop-wait rank=4", "Expected rank=0 to rank=3 in 'drop-wait rank=4', got 4."),
    ],
)
def test_a_bad_fault_gets_one_line(text: str, expected: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text, 4)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
