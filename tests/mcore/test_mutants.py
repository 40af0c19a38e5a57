"""Hooks with one defect: a run must fail and name what is wrong, though its loss may be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture

from real.config import Scenario
from sim.world import WorldError

SMALL = Scenario(num_layers=2, num_microbatches=2, world_size=2, train_iters=1)

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]


def train(change: Callable[[Any], None], scenario: Scenario) -> Callable[[int, Records], object]:
    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(scenario)
        change(job.model)
        return job.forward_backward(0)

    return body


def test_hooks_on_every_submodule_use_a_unit_after_its_last_gradient(run_ranks: RunRanks) -> None:
    """A module without parameters runs backward after its unit's last gradient."""
    scenario = SMALL.changed(transformer_impl="transformer_engine")

    def hook_the_rest(model: Any) -> None:  # noqa: ANN401 - the adapter, imported late
        hooked = {demand.module for demand in model.install().plan.demand}
        scheduler = model.scheduler
        for name, module in model.module.named_modules():
            if name not in hooked:
                unit = max((u for u in scheduler.units if is_within(name, u)), key=len)
                module.register_forward_pre_hook(
                    lambda *_, unit=unit, name=name: scheduler.pre_forward(unit, name)
                )
                module.register_full_backward_pre_hook(
                    lambda *_, unit=unit, name=name: scheduler.pre_backward(unit, name)
                )

    with pytest.raises(
        WorldError, match=r"FSDP unit 'decoder\.layers\.\d' .*, got it unsharded again"
    ):
        run_ranks(scenario, train(hook_the_rest, scenario))


def is_within(name: str, unit: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def test_a_lost_completion_hook_is_named(run_ranks: RunRanks) -> None:
    """Its gradient is there, so zeros would be wrong, and waiting for it would be for ever."""
    name = "decoder.layers.1.self_attention.linear_proj.weight"

    def lose(model: Any) -> None:  # noqa: ANN401 - the adapter, imported late
        unit = model.scheduler.units["decoder.layers.1"].unit
        unit.trainable_parameters[name]._post_accumulate_grad_hooks.clear()

    with pytest.raises(WorldError, match=f"completion hook for the gradient of '{name}'"):
        run_ranks(SMALL, train(lose, SMALL))


def test_a_lost_backward_hook_is_noticed_at_the_first_gradient(run_ranks: RunRanks) -> None:
    """The values of a sharded unit are gone, and its first gradient finds the unit at rest."""

    def lose(model: Any) -> None:  # noqa: ANN401 - the adapter, imported late
        for name, module in model.module.named_modules():
            if name.startswith("decoder.layers.1"):
                module._forward_hooks.clear()
                module._backward_pre_hooks.clear()

    with pytest.raises(WorldError, match=r"'gradient' by .* its phase is 'resting'"):
        run_ranks(SMALL, train(lose, SMALL))


def test_a_second_set_of_hooks_is_noticed_at_the_first_gradient(
    run_ranks: RunRanks, mocker: MockerFixture
) -> None:
    """Every gradient would count twice, and half of a unit's would complete it."""

    def install_again(model: Any) -> None:  # noqa: ANN401 - the adapter, imported late
        from real.hooks import install

        handle = model.install()
        parameters = {
            name: parameter
            for unit in handle.scheduler.units.values()
            for name, parameter in unit.unit.trainable_parameters.items()
        }
        mocker.patch.object(install, "installed_handle", return_value=None)
        install.install_hooks(model.module, handle.plan, lambda _: handle.scheduler, parameters)

    with pytest.raises(
        WorldError, match=r"Expected 1 gradient\(s\) of '.*' per microbatch in FSDP unit '.*', got"
    ):
        run_ranks(SMALL, train(install_again, SMALL))
