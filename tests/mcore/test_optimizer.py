"""Gradient norm, clipping, and the refresh of the model weights, over meshes of several shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture

from real.config import Scenario

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]

SMALL = Scenario(num_layers=2, num_microbatches=2, train_iters=1)
HYBRID = {"world_size": 8, "num_distributed_optimizer_instances": 2}
MESHES = {
    "ep2-dp2": SMALL,
    "ep4": SMALL.changed(expert_model_parallel_size=4),
    "hybrid": SMALL.changed(**HYBRID),
    "hybrid-sharded-outer": SMALL.changed(**HYBRID, outer_dp_sharding_strategy="optim"),
}
SHARDED_OUTER = MESHES["hybrid-sharded-outer"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_norm_and_clipping_equal_the_reference(run_ranks: RunRanks, mesh: str) -> None:
    """Experts and dense weights are spread over different ranks; a sum over one group is wrong."""
    scenario = MESHES[mesh].changed(clip_grad=0.25)

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(scenario)
        job.forward_backward(0)
        norm = job.grad_norm()
        job.clip(norm)
        clipped = job.grad_norm()
        job.clip(clipped)
        return float(norm), float(clipped), float(job.grad_norm())

    def reference(rank: int, records: Records) -> float:
        from real.mcore.jobs import ReferenceJob

        job = ReferenceJob(scenario)
        job.forward_backward(0)
        return float(job.grad_norm())

    plain = scenario.changed(num_distributed_optimizer_instances=1)
    expected = run_ranks(plain, reference)
    assert len(set(expected)) == 1
    assert expected[0] > 0.25
    for norm, clipped, clipped_again in run_ranks(scenario, body):
        assert norm == pytest.approx(expected[0], rel=1e-3)
        assert clipped == pytest.approx(0.25, rel=1e-3)
        assert clipped_again == pytest.approx(clipped, rel=1e-5)


@pytest.mark.slow
def test_a_norm_before_the_last_microbatch_is_refused(run_ranks: RunRanks) -> None:
    """Over the outer axis the gradients are not reduced yet."""
    scenario = MESHES["hybrid"]

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(scenario)
        with job.model.no_sync():
            job.forward_backward(0)
        with pytest.raises(RuntimeError, match=r"got them before the last microbatch\.$"):
            job.grad_norm()
        return True

    assert run_ranks(scenario, body) == [True] * 8


def refreshed_units(
    run_ranks: RunRanks, mocker: MockerFixture, *, shard: Callable[[Any], None]
) -> list[list[str]]:
    """Returns for each rank the units in the order in which a step refreshed their weights.

    Parameter groups hash by their place in the model, forward on even and backward on odd ranks: a
    set of them then has another order on each, as it may with addresses.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group import (
        FsdpParameterGroup,
    )

    from real.mcore import internals
    from real.mcore.internals.lifetime import GroupLink

    mocker.patch.object(GroupLink, "__hash__", lambda link: hash(link.group))
    mocker.patch.object(internals, "shard_optimizer")  # the test chooses what takes its place
    mocker.patch.object(
        FsdpParameterGroup, "__hash__", lambda group: getattr(group, "testbed_hash", 0)
    )
    released = FsdpParameterGroup.sync_model_weight_from_main_weight

    def body(rank: int, records: Records) -> list[str]:
        from real.mcore.jobs import FsdpJob
        from real.mcore.training import make_optimizer

        job = FsdpJob(SHARDED_OUTER)
        names = {}
        numbers = itertools.count()
        for name, unit in internals.collect_units(job.model.module).items():
            for group in unit.module._parameter_groups:
                number = next(numbers)
                group.testbed_hash = number if rank % 2 == 0 else 31 - number
                names[id(group)] = name
        optimizer = make_optimizer(SHARDED_OUTER, list(job.model.module.parameters()))
        shard(optimizer)
        job.forward_backward(0)
        order: list[str] = []
        # Only the order is asked for: the refresh itself is collective and would mix ranks up.
        seen[rank] = (names, order)
        optimizer.step()
        return order

    seen: dict[int, tuple[dict[int, str], list[str]]] = {}

    def note(group: Any) -> None:  # noqa: ANN401 - MFSDP's class, imported late
        from sim.world.world import current_world

        names, order = seen.get(current_world()[1], ({}, []))
        if id(group) in names:
            order.append(names[id(group)])
        else:
            released(group)

    mocker.patch.object(FsdpParameterGroup, "sync_model_weight_from_main_weight", note)
    return run_ranks(SHARDED_OUTER, body)


@pytest.mark.slow
def test_ranks_refresh_their_weights_in_the_same_order(
    run_ranks: RunRanks, mocker: MockerFixture
) -> None:
    """Over a sharded outer axis each refresh is a collective of all ranks."""
    from real.mcore.internals.optimizer import shard_optimizer

    orders = refreshed_units(run_ranks, mocker, shard=shard_optimizer)
    assert set(orders[0]) == {
        "",
        *(f"decoder.layers.{i}{part}" for i in range(2) for part in ("", ".mlp.experts")),
    }
    assert orders == [orders[0]] * 8


@pytest.mark.slow
def test_mfsdp_refreshes_in_the_order_of_a_set(run_ranks: RunRanks, mocker: MockerFixture) -> None:
    """This is what our order replaces; when it ends, so can ours."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.optimizer import (
        fully_shard_optimizer,
    )

    even, odd = refreshed_units(run_ranks, mocker, shard=fully_shard_optimizer)[:2]
    assert sorted(even) == sorted(odd)
    assert even != odd
