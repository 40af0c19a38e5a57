"""Two model chunks of a pipeline on one rank: both have a decoder.layers.0, which are two units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from real.trace.read import UnitKey, declared_units, named_storages
from sim.checks import check_traces

Story = Callable[..., Trace]

TWO_CHUNKS = """
    install 0
    unit layers.0 bytes 64
    unit layers.0@1 bytes 64
    parameter layers.0.w of layers.0 x 1
    parameter layers.0.w of layers.0@1 x 2
    name 7 layers.0:full weight = 0
    step begin 0
    node mlp forward layers.0 0
    hook pre_forward layers.0
    phase layers.0 resting > forward by use in forward
    1: all_gather of layers.0 5 -> 7
    version layers.0 3
    1: unshard layers.0
    end mlp forward
    node mlp forward layers.0 0
    hook pre_forward layers.0 of layers.0@1
    phase layers.0@1 resting > forward by use in forward
    1: all_gather of layers.0@1 6 -> 8
    version layers.0@1 9
    1: unshard layers.0@1
    end mlp forward
    phase layers.0@1 forward > resting by release after forward
    {release}
    phase layers.0 forward > resting by release after forward
    1: reshard layers.0
    node mlp backward layers.0 0
    hook post_gradient layers.0.w of layers.0
    2: reduce layers.0
    hook post_gradient layers.0.w of layers.0@1
    {second}
    2: reduce layers.0@1
    end mlp backward
    step end 0
"""
RELEASE = "1: reshard layers.0@1"
SECOND = "hook post_gradient layers.0.w of layers.0@1"


def found(trace: Trace) -> list[tuple[str, str | None]]:
    return [(violation.rule, violation.unit) for violation in check_traces([trace])]


def test_units_of_two_chunks_are_not_mixed_up(story: Story) -> None:
    """By name alone they would be gathered twice, of a moving version, with two owners."""
    assert found(story(TWO_CHUNKS.format(release=RELEASE, second=SECOND))) == []


@pytest.mark.parametrize(
    ("release", "second", "rule"),
    [
        (RELEASE, "push a\npop", "I5"),
        ("push a\npop", SECOND, "I3"),
        (f"{RELEASE}\n{RELEASE}", SECOND, "I3"),
        (f"{RELEASE}\nversion layers.0@1 10", SECOND, "I21"),
    ],
    ids=["a gradient less", "not released", "released twice", "version"],
)
def test_a_fault_is_in_the_chunk_that_has_it(
    story: Story, release: str, second: str, rule: str
) -> None:
    """And the report says in which."""
    trace = story(TWO_CHUNKS.format(release=release, second=second))
    assert found(trace) == [(rule, "layers.0 of chunk 1")]


def test_an_owner_in_another_chunk_is_none(story: Story) -> None:
    """The nearest unit is one of the parameter's own chunk."""
    trace = story("unit layers.0\nparameter layers.0.w of layers.0@1 x 1")
    assert found(trace) == [("I15", "layers.0 of chunk 1")]


def test_keys_tell_chunks_apart(story: Story) -> None:
    """What has no chunk is in the first one."""
    trace = story("unit layers.0\nunit layers.0@1\nname 7 layers.0:full weight")
    assert list(declared_units(trace)) == [UnitKey(0, "layers.0"), UnitKey(1, "layers.0")]
    assert list(map(str, declared_units(trace))) == ["layers.0", "layers.0 of chunk 1"]
    assert str(named_storages(trace)[7]) == "the full weight of unit layers.0"
    assert str(UnitKey(0, "")) == "<root>"
