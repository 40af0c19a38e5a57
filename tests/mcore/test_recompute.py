"""Activation recompute in plain MFSDP v2 with our hooks: no Megatron model, no schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

from real.config import Scenario
from real.hooks import HookHandle, ScheduledUnit, UnitScheduler, build_plan, install_hooks

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]

TWO_RANKS = Scenario(num_layers=2, world_size=2)
RECOMPUTE = {"none": None, "reentrant": True, "non-reentrant": False}


class Block(nn.Module):
    """A residual two-layer perceptron of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TwoBlocks(nn.Module):
    """Two blocks between two projections; the blocks may be recomputed."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def shard_and_hook(model: TwoBlocks) -> HookHandle:
    """Makes a unit of each block and of the root, and puts our hooks in place of MFSDP's own."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import fully_shard
    from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import (
        MixedPrecisionPolicy,
    )

    from real.mcore import internals
    from real.mcore.shard import placements_of

    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cuda", mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh, placements_of(mesh, False), mixed_precision_policy=policy)
    context = internals.initialize_context(model)
    units = internals.collect_units(model)
    plan = build_plan(model, units, layers=["blocks.0", "blocks.1"])
    internals.detach_execution_hooks(model)

    def make_scheduler(_: object) -> UnitScheduler:
        scheduled = {
            name: ScheduledUnit(
                unit,
                fires=dict.fromkeys(unit.trainable_parameters, 1),
                is_released_by_schedule=True,
            )
            for name, unit in units.items()
        }
        return UnitScheduler(context, scheduled, fence_owner="the test")

    parameters = {n: p for unit in units.values() for n, p in unit.trainable_parameters.items()}
    return install_hooks(model, plan, make_scheduler, parameters)


def short(record: dict[str, Any]) -> str | None:
    """Returns `U+ a` for a gather of unit a, `U- a` for its release, `RS a` for its reduction."""
    unit = record.get("unit") or "root"
    if record["op"] == "unshard" and record["gathered"]:
        return f"U+ {unit}"
    return {"reshard": f"U- {unit}", "reduce": f"RS {unit}"}.get(record["op"])


FORWARD = [
    "U+ root",
    *["U+ blocks.0", "U- blocks.0"],
    *["U+ blocks.1", "U- blocks.1"],
    "U- root",
]
BACKWARD = [
    "U+ root",
    *["U+ blocks.1", "U- blocks.1", "RS blocks.1"],
    *["U+ blocks.0", "U- blocks.0", "RS blocks.0"],
    *["U- root", "RS root"],
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_recomputed_block_is_released_by_its_backward_alone(
    run_ranks: RunRanks, recompute: str
) -> None:
    """A release after the recomputed forward would take the weights that backward then reads."""

    def body(rank: int, records: Records) -> object:
        from real.mcore import internals

        torch.manual_seed(0)
        model = TwoBlocks(RECOMPUTE[recompute]).cuda()
        plain = copy.deepcopy(model)
        plain.use_reentrant = None
        scheduler = shard_and_hook(model).scheduler
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)).cuda()
        loss = model(x).square().mean()
        num_before_backward = len(records)
        loss.backward()
        scheduler.finish_grad_sync()
        expected_loss = plain(x).square().mean()
        expected_loss.backward()
        gradients = internals.full_gradients(model)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
        return (
            float(loss.detach()) == float(expected_loss.detach()),
            [done for record in records[:num_before_backward] if (done := short(record))],
            [done for record in records[num_before_backward:] if (done := short(record))],
            {unit.lifecycle.phase.value for unit in scheduler.units.values()},
        )

    assert run_ranks(TWO_RANKS, body) == [(True, FORWARD, BACKWARD, {"resting"})] * 2
