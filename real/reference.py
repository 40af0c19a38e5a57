"""What a scenario is compared with, and how close it has to come."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from real.config import Scenario, ScenarioError

MAX_LOSS_REL_ERROR: Final = 1e-4
"""Losses after the first step: the weights differ by rounding from then on."""


class Reference(StrEnum):
    """The same model and data another way: the first two without FSDP."""

    DDP = "ddp"
    """Megatron's distributed data parallel, its plain schedule and torch's optimizer."""
    DISTOPT = "distopt"
    """Megatron's distributed optimizer, under the scenario's schedule."""
    PLAIN = "plain"
    """The same target, with FSDP, under its plain schedule."""


class LossBars(NamedTuple):
    """How far losses may be from those of a reference, relative to them.

    The first loss is equal to the last bit: the weights differ by rounding only after it.
    """

    step: float
    final: float


LOSS_BARS: Final = {
    Reference.DDP: LossBars(step=MAX_LOSS_REL_ERROR, final=MAX_LOSS_REL_ERROR),
    Reference.DISTOPT: LossBars(step=1e-3, final=2e-5),
    Reference.PLAIN: LossBars(step=MAX_LOSS_REL_ERROR, final=MAX_LOSS_REL_ERROR),
}


def check_reference(scenario: Scenario, reference: Reference) -> None:
    """Refuses a reference that cannot train a scenario.

    Raises:
        ScenarioError: It cannot.
    """
    if reference is Reference.DISTOPT and scenario.optimizer != "adam":
        raise ScenarioError(
            "Expected optimizer of adam with the reference distopt (Megatron's distributed "
            f"optimizer takes no other of the scenario's), got {scenario.optimizer}."
        )
