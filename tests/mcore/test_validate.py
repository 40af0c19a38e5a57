"""What cannot be done is refused by the name of its option, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture
from torch import nn

from real.config import Scenario
from real.mcore.validate import LIMITS
from real.mcore.versions import UnsupportedVersion, check_megatron_version

SMALL = Scenario(num_layers=2, world_size=2)

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]

BEYOND: dict[str, dict[str, object]] = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {"virtual_pipeline_model_parallel_size": 2},
    "context_parallel_size": {"context_parallel_size": 2},
    "fp8": {"fp8": "hybrid"},
    "fp4": {"fp4": "e2m1"},
    "gradient_accumulation_fusion": {"gradient_accumulation_fusion": True},
    "cuda_graph_impl": {"cuda_graph_impl": "local"},
    "calculate_per_token_loss": {"calculate_per_token_loss": True},
    "recompute_granularity": {"recompute_granularity": "full"},
    "delay_wgrad_compute": {
        "delay_wgrad_compute": True,
        "overlap_moe_expert_parallel_comm": False,
    },
    "moe_shared_expert_overlap": {"moe_shared_expert_overlap": True},
    "mtp_num_layers": {"mtp_num_layers": 2},
}
"""A config beyond each limit, by the option's name."""


def test_every_limit_is_tried() -> None:
    """A limit that no test breaks may refuse nothing."""
    assert [limit.option for limit in LIMITS] == list(BEYOND)


def state_of(model: nn.Module) -> object:
    """Returns what sharding changes: classes, parameters and hooks of every module."""
    return [
        (
            name,
            type(module),
            [(local, id(parameter)) for local, parameter in module.named_parameters(recurse=False)],
            list(module._forward_pre_hooks),
            list(module._forward_hooks),
            list(module._backward_pre_hooks),
            list(module._load_state_dict_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


def test_each_limit_refuses_its_option_and_changes_nothing(run_ranks: RunRanks) -> None:
    """The caller can change the option and try the same model again."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.model import build_model, make_config
        from real.mcore.schedule import wrap_model
        from real.mcore.shard import make_meshes

        model = build_model(make_config(SMALL, is_overlapped=True), SMALL)
        meshes = make_meshes()
        before = state_of(model)
        messages = {}
        for option, values in BEYOND.items():
            config = make_config(SMALL, is_overlapped=True)
            for name, value in values.items():
                setattr(config, name, value)
            with pytest.raises(ValueError, match=f"Expected {option} to be ") as raised:
                wrap_model(config, model, meshes, expert_parallel_size=2)
            messages[option] = (str(raised.value), str(getattr(config, option)))
            assert state_of(model) == before, option
            assert config.no_sync_func is None
        wrap_model(make_config(SMALL, is_overlapped=True), model, meshes, expert_parallel_size=2)
        return messages

    for option, (message, value) in run_ranks(SMALL, body)[0].items():
        limit = next(limit for limit in LIMITS if limit.option == option)
        assert value in message.replace("'", "")
        assert message.endswith(f". {limit.reason}")


def test_a_model_without_decoder_layers_is_refused(run_ranks: RunRanks) -> None:
    """Nothing in it would be a unit but the root."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.model import make_config
        from real.mcore.schedule import wrap_model
        from real.mcore.shard import make_meshes

        config = make_config(SMALL, is_overlapped=True)
        with pytest.raises(ValueError, match="a model with decoder layers, got Linear"):
            wrap_model(config, nn.Linear(2, 2), make_meshes(), expert_parallel_size=2)
        return True

    assert run_ranks(SMALL, body) == [True] * 2


@pytest.mark.parametrize(
    "keys",
    [
        {"freeze": "embedding.*"},
        {
            "freeze": "*.layers.1.*",
            "transformer_impl": "transformer_engine",
            "delay_wgrad_compute": True,
        },
    ],
    ids=["embedding", "delayed"],
)
def test_frozen_weights_that_the_schedule_cannot_drive_are_refused(
    run_ranks: RunRanks, keys: dict[str, object]
) -> None:
    """The embedding's node runs backward, and Transformer Engine's queue must have a gradient.

    Both fail deep inside, in the first backward.
    """
    scenario = SMALL.changed(**keys)

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        with pytest.raises(ValueError, match=r"Expected .* to be trainable"):
            FsdpJob(scenario)
        return True

    assert run_ranks(scenario, body) == [True] * 2


def test_a_dense_last_layer_is_refused_by_the_combined_schedule(run_ranks: RunRanks) -> None:
    """The released schedule would leave out the final norm: another loss, and no error."""
    scenario = SMALL.changed(num_layers=2, moe_layer_freq="1,0")

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        with pytest.raises(ValueError, match="Expected the last decoder layer to be MoE"):
            FsdpJob(scenario)
        FsdpJob(scenario.changed(overlap_moe_expert_parallel_comm=False))
        return True

    assert run_ranks(scenario, body) == [True] * 2


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "0.190.1", "1.19.0"])
def test_another_series_of_megatron_is_one_clear_error(mocker: MockerFixture, version: str) -> None:
    """Its private names may be others."""
    mocker.patch("importlib.metadata.version", return_value=version)
    with pytest.raises(UnsupportedVersion) as raised:
        check_megatron_version()
    assert str(raised.value) == (
        f"Expected megatron-core 0.19.* (tested with 0.19.2), got {version}."
    )


def test_the_installed_megatron_is_of_the_supported_series() -> None:
    """Otherwise every other test here says little."""
    assert check_megatron_version().startswith("0.19.")
