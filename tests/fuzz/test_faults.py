"""Every fault that breaks something is noticed and names its rank; the others change nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from real.result import RunResult
from real.trace import MemorySink
from sim.faults import DelayRank, Fault, needs_kernels, parse_fault
from sim.fuzz.seeds import Setting, Turns, run_once
from sim.quiet import quiet
from sim.session.megatron import megatron_on_fake_cuda
from sim.session.options import RunOptions
from sim.session.run import run_in_process, run_reference
from sim.world import WorldError
from tests.fuzz.conftest import SMALL

if TYPE_CHECKING:
    from real.output import JobOutput

BREAKING = {
    "skip-collective rank=1 index=12": "Deadlock: no rank can go on",
    "swap-collectives rank=1 index=12": "Deadlock: no rank can go on",
    "lose-completion rank=1 index=12": "whose completion was lost",
    "drop-wait rank=1 unit=decoder.layers.0": "I1: The full weight of unit decoder.layers.0",
    "drop-wait rank=1 stream=compute on=all_gather n=0": "I1: The full weight of unit <root>",
    "drop-wait rank=1 stream=communication on=compute": "I1: Storage",
    "drop-wait rank=1 stream=reduce_scatter on=compute n=1": "used by two streams in no order",
    "drop-wait rank=1 stream=compute on=reduce_scatter": "The main gradient of unit <root>",
    "drop-wait rank=1 stream=all_gather on=compute": "I4: The full weight of unit",
    "swap-hooks rank=1 point=pre_forward": "Rank 1 raised RuntimeError",
    "swap-hooks rank=1 point=pre_backward": "Rank 1 raised IllegalStep",
    "lose-callback rank=1": "Expected a completion hook for the gradient",
    "lose-callback rank=1 point=pre_forward unit=decoder.layers.0": "Rank 1 raised RuntimeError",
    "lose-callback rank=1 point=pre_backward": "Rank 1 raised IllegalStep",
    "lose-callback rank=1 point=release_forward": "rank 1",
    "free-early rank=1 unit=decoder.layers.0": "Rank 1 raised RuntimeError",
    "free-early rank=1 unit=decoder.layers.0 point=pre_backward": "its storage was released",
    "double-install rank=1": "Expected 1 gradient(s) of",
}
"""Faults with a part of what is said of them."""

HARMLESS = (
    "delay-rank rank=1 at=3 turns=20",
    "stall-stream rank=1 stream=reduce_scatter",
    "stall-collective rank=1 unit=decoder.layers.0",
)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        quiet()
        yield


@pytest.fixture(scope="module")
def references() -> list[JobOutput]:
    return run_reference(SMALL)


def run(references: list[JobOutput], *faults: Fault) -> RunResult:
    has_kernels = not faults or any(map(needs_kernels, faults))
    return run_in_process(
        SMALL,
        RunOptions(faults=faults, kernel_steps=None if has_kernels else ()),
        references=references,
    )


@pytest.mark.slow
def test_without_a_fault_nothing_is_said(references: list[JobOutput]) -> None:
    """The twin of every test below."""
    assert run(references).problems() == []


@pytest.mark.parametrize("text", BREAKING)
def test_a_breaking_fault_is_noticed_and_names_its_rank(
    references: list[JobOutput], text: str
) -> None:
    try:
        said = "\n".join(run(references, parse_fault(text)).problems())
    except WorldError as error:
        said = str(error)
    assert BREAKING[text] in said
    assert "rank 1" in said.lower()
    assert "never came up" not in said


@pytest.mark.parametrize("text", HARMLESS)
def test_a_delay_or_stall_changes_nothing(references: list[JobOutput], text: str) -> None:
    """They are orders that a machine may choose."""
    assert run(references, parse_fault(text)).problems() == []


def test_a_wait_that_is_missing_shows_under_a_stall(references: list[JobOutput]) -> None:
    """The vector clocks say the same; the stall says it without them."""
    result = run(
        references,
        parse_fault("drop-wait rank=1 stream=compute on=all_gather"),
        parse_fault("stall-stream rank=1 stream=all_gather"),
    )
    by_order = [text for text in result.violations if "In a legal order of the device" in text]
    assert len(by_order) == 1
    assert by_order[0].startswith("I1: In a legal order of the device, the full weight of unit")
    assert "at rank 1, unit <root>" in by_order[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("skip-collective rank=1 index=9999", "collectives."),
        ("drop-wait rank=1 unit=nowhere", "waits."),
        ("lose-callback rank=1 module=nowhere", "hook calls."),
        ("delay-rank rank=1 at=9999", "switches."),
        ("stall-stream rank=1 stream=9", "never came up."),
    ],
)
def test_a_fault_that_never_came_up_is_told(
    references: list[JobOutput], text: str, count: str
) -> None:
    """It would make whoever gave it believe that the run survived it."""
    with pytest.raises(WorldError) as caught:
        run(references, parse_fault(text))
    assert caught.value.problem.startswith(f"All ranks finished, but fault '{text}' never came up")
    assert caught.value.problem.endswith(count)


def test_a_delay_changes_the_turns_and_no_trace() -> None:
    """Otherwise a delay would be none, or a trace would not be the rank's own."""
    sinks = [[MemorySink(), MemorySink()] for _ in range(2)]
    delay = DelayRank(rank=1, at=0, turns=10)  # it comes first without
    setting = Setting(scenario=SMALL)
    with megatron_on_fake_cuda():
        _, without = run_once(setting, sinks=sinks[0])
        _, delayed = run_once(setting, sinks=sinks[1], turns=Turns(delays=[delay]))
    assert without.order != delayed.order
    first, second = ([sink.records for sink in both] for both in sinks)
    assert first == second


def test_the_hooks_are_as_before_after_a_fault(references: list[JobOutput]) -> None:
    """The guard takes off what it put on."""
    from real.hooks.scheduler import UnitScheduler
    from sim.cuda.streams import Stream

    before = [UnitScheduler.pre_forward, Stream.wait_event, Stream.wait_stream]
    with pytest.raises(WorldError):
        run(references, parse_fault("free-early rank=1"))
    assert [UnitScheduler.pre_forward, Stream.wait_event, Stream.wait_stream] == before


def test_turns_given_up_change_the_turns_and_no_trace() -> None:
    sinks = [[MemorySink(), MemorySink()] for _ in range(2)]
    setting = Setting(scenario=SMALL)
    with megatron_on_fake_cuda():
        _, without = run_once(setting, sinks=sinks[0])
        _, with_more = run_once(setting, sinks=sinks[1], turns=Turns(switch_chance=0.5))
    assert with_more.num_switches > without.num_switches
    first, second = ([sink.records for sink in both] for both in sinks)
    assert first == second
