"""Who owns a parameter, and on which ranks it is spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from real.trace import Trace
from sim.checks.evidence import evidence_of
from sim.checks.ownership import JUDGES, check_ownership

Story = Callable[..., Trace]

UNITS = "unit <root>\nunit layers.0\nunit layers.0.mlp.experts"


def _messages(trace: Trace) -> list[str]:
    return [v.message for v in check_ownership([trace]) if v.rule == "I15"]


def test_the_nearest_enclosing_unit_owns_a_parameter(story: Story) -> None:
    """Names tell what encloses what; layers.0 does not enclose layers.01."""
    trace = story(f"""
        {UNITS}
        parameter layers.0.w of layers.0 x 1
        parameter layers.0.mlp.experts.w of layers.0.mlp.experts x 1
    """)
    assert _messages(trace) == []


def test_where_no_unit_is_declared_nobody_is_nearest(story: Story) -> None:
    """A target that records parameters alone: the rule is not judged, and not broken."""
    trace = story("parameter layers.0.w of layers.0 x 1")
    assert _messages(trace) == []
    assert all(judge.missing(evidence_of(trace, 1)) for judge in JUDGES if judge.rule == "I15")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parameter layers.0.mlp.experts.w of layers.0 x 1",
            (
                "Expected parameter layers.0.mlp.experts.w in its nearest unit "
                "layers.0.mlp.experts, got it in layers.0."
            ),
        ),
        (
            "parameter layers.01.w of layers.0 x 1",
            "Expected parameter layers.01.w in its nearest unit <root>, got it in layers.0.",
        ),
        ("parameter layers.0.w of nobody x 0", "Parameter layers.0.w has no owner."),
    ],
)
def test_another_owner_or_none_is_found(story: Story, text: str, message: str) -> None:
    """It would be gathered with a unit that is not there when it is used."""
    assert _messages(story(f"{UNITS}\n{text}")) == [message]


def test_two_owners_are_found(story: Story) -> None:
    """Each would reduce it."""
    owned = "parameter layers.0.w of layers.0 x 1"
    assert _messages(story(f"{UNITS}\n{owned}\n{owned}")) == [
        "Parameter layers.0.w has two owners, layers.0 and layers.0."
    ]


def test_tied_names_are_one_parameter(story: Story) -> None:
    """Two copies would drift apart after the first step."""
    one = "parameter layers.0.w of layers.0 x 2 named layers.0.w layers.0.v"
    two = one.replace("layers.0.w of", "layers.0.v of")
    assert _messages(story(f"{UNITS}\n{one}")) == []
    assert _messages(story(f"{UNITS}\n{one}\n{two}")) == [
        "Expected layers.0.w and layers.0.v to be one parameter, since they are tied, got two."
    ]


@pytest.mark.parametrize(
    ("unit", "rules"),
    [
        ("unit layers.0 ranks 0 1 2 3", []),
        ("unit layers.0 ranks 1 3", ["I15"]),
        ("unit layers.0.mlp.experts ranks 1 3 divisor 2", []),
        ("unit layers.0.mlp.experts ranks 0 1 divisor 2", ["I15"]),
        ("unit layers.0.mlp.experts ranks 0 1 2 3 divisor 2", ["I15"]),
        ("unit layers.0.mlp.experts ranks 1 3 divisor 1", ["I14"]),
        ("unit layers.0 ranks 0 1 2 3 divisor 2", ["I14"]),
    ],
)
def test_mesh_and_divisor_are_those_of_the_unit_s_kind(
    story: Story, unit: str, rules: list[str]
) -> None:
    """Experts are equal on every second rank of four when two ranks share them."""
    trace = story(unit, rank=1, world_size=4, scenario={"expert_model_parallel_size": 2})
    assert [v.rule for v in check_ownership([trace])] == rules


def test_a_new_installation_declares_anew(story: Story) -> None:
    """Hooks were taken off in between."""
    text = "unit layers.0\nparameter layers.0.w of layers.0 x 1"
    assert _messages(story(f"{text}\nremove 0\n{text}")) == []
