"""Megatron's distributed optimizer as the reference, on fake ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from real.compare import GradientGap, WeightGap
from real.config import Scenario, ScenarioError
from real.reference import Reference, check_reference
from real.result import RunResult, as_json

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]

SMALL = Scenario(num_layers=1, num_microbatches=2, train_iters=2)
DELAYED = SMALL.changed(
    world_size=2, transformer_impl="transformer_engine", delay_wgrad_compute=True
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [SMALL.changed(clip_grad=0.25), DELAYED], ids=["clipped", "delayed wgrad"]
)
def test_the_distributed_optimizer_agrees_with_the_other_reference(
    run_ranks: RunRanks, scenario: Scenario
) -> None:
    """Two jobs that share neither optimizer nor clipping nor schedule: what both say is right.

    Its gradients and weights are gathered from shards; a wrong place would show in both.
    """

    def body(rank: int, records: Records) -> object:
        from real.mcore.distopt import make_reference
        from real.mcore.jobs import run_job

        mine, theirs = (
            run_job(make_reference(scenario, reference), scenario)
            for reference in (Reference.DISTOPT, Reference.DDP)
        )
        assert mine.weights.keys() == theirs.weights.keys()
        for name, weight in theirs.weights.items():
            # Adam moves each weight by about lr a step, and a few with small gradients otherwise.
            assert (mine.weights[name] - weight).abs().mean() < 0.2 * scenario.lr, name
        for name, gradient in theirs.steps[0].gradients.items():
            difference = (mine.steps[0].gradients[name] - gradient).abs().max()
            assert difference <= 1e-2 * gradient.abs().max(), name
        norms = [(a.grad_norm, b.grad_norm) for a, b in zip(mine.steps, theirs.steps, strict=True)]
        assert mine.steps[0].loss == theirs.steps[0].loss
        return norms

    for norms in run_ranks(scenario, body):
        for mine, theirs in norms:
            assert mine == pytest.approx(theirs, rel=1e-3)
            assert mine > 0.25  # so that it is clipped where that is asked for


def test_other_optimizers_are_refused() -> None:
    """Megatron's own refusal comes later and speaks of checkpoints."""
    sgd = SMALL.changed(optimizer="sgd")
    check_reference(sgd, Reference.DDP)
    with pytest.raises(ScenarioError, match=r"^Expected optimizer of adam .* got sgd\.$"):
        check_reference(sgd, Reference.DISTOPT)


RESULT = RunResult(
    ranks=2,
    losses=[4.0, 4.0, 4.0],
    reference_losses=[4.0, 4.0, 4.0],
    gap=GradientGap(relative=0.0, parameter="a", rank=0, step=0),
    later_gap=GradientGap(relative=0.0, parameter="a", rank=0, step=0),
    weight_gap=WeightGap(absolute=0.0, parameter="a", rank=0, num_outside=0),
    grad_norm_rel_error=0.0,
    num_records=0,
    wall_s=0.0,
    trace=None,
)


@pytest.mark.parametrize(
    ("reference", "losses", "steps"),
    [
        (Reference.DISTOPT, [4.0, 4.0039, 4.00007], []),
        (Reference.DISTOPT, [4.0, 4.0041, 4.0], [1]),
        (Reference.DISTOPT, [4.0, 4.0, 4.00009], [2]),
        (Reference.DDP, [4.0, 4.0005, 4.0003], [1]),
        (Reference.DDP, [4.0, float("nan"), 4.0], [1]),
    ],
)
def test_the_bar_is_that_of_the_reference(
    reference: Reference, losses: list[float], steps: list[int]
) -> None:
    """Against the distributed optimizer 1e-3 at each step, and 2e-5 at the end."""
    result = replace(RESULT, reference=reference, losses=losses)
    assert [problem.split("step ")[1][0] for problem in result.problems()] == [
        str(step) for step in steps
    ]
    assert as_json(result)["reference"] == reference.value
