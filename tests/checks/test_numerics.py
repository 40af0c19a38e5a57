"""Gradients against the reference: which difference is which fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sim.checks import check_numerics

NAME = "layers.0.mlp.experts.w"
REFERENCE = torch.linspace(-1, 1, 64).view(8, 8)
OTHER = torch.linspace(1, 2, 64).view(8, 8).square()


def _job(*gradients: torch.Tensor) -> Any:  # noqa: ANN401 - what a job returns, without Megatron
    return SimpleNamespace(steps=[SimpleNamespace(gradients={NAME: g}) for g in gradients])


def _rules(*gradients: torch.Tensor) -> list[str]:
    found = check_numerics([_job(*gradients)], [_job(*[REFERENCE] * len(gradients))])
    return [violation.rule for violation in found]


@pytest.mark.parametrize(
    ("gradient", "rules"),
    [
        (REFERENCE, []),
        (REFERENCE + 0.005, []),
        (REFERENCE * 2, ["I14"]),
        (REFERENCE / 2 + 0.001, ["I14"]),
        (REFERENCE * -1, ["I14"]),
        (REFERENCE * 0, ["I13"]),
        (REFERENCE + OTHER, ["I13"]),
        (REFERENCE * float("nan"), ["I13"]),
    ],
    ids=["equal", "rounding", "double", "half", "negative", "zero", "another part", "NaN"],
)
def test_the_first_step_is_judged_by_value(gradient: torch.Tensor, rules: list[str]) -> None:
    """A constant factor is a divisor; anything else is a wrong sum."""
    assert _rules(gradient) == rules


def test_later_steps_are_judged_by_size() -> None:
    """Weights differ by rounding, and tokens go to other experts."""
    assert _rules(REFERENCE, REFERENCE + 0.1) == []
    assert _rules(REFERENCE, REFERENCE * 2) == ["I13"]


def test_a_fault_is_told_at_its_first_step() -> None:
    """The steps after it start from other weights."""
    assert _rules(REFERENCE * 2, OTHER) == ["I14"]


def test_a_report_names_parameter_unit_rank_and_factor() -> None:
    """Two is the number of expert-parallel ranks, and that is the clue."""
    [violation] = check_numerics(
        [_job(REFERENCE * 2)],
        [_job(REFERENCE)],
        units={NAME: "layers.0.mlp.experts"},
        ranks=[3],
    )
    assert str(violation).splitlines() == [
        f"I14: In step 0 the gradient of {NAME} is 2 times that of the reference.",
        "  at rank 3, unit layers.0.mlp.experts",
    ]
