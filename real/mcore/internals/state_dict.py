"""Keeps `load_state_dict` safe on a sharded model."""

from __future__ import annotations

from typing import Any

from torch import nn

from real.mcore.internals.units import is_fsdp_module


def guard_state_dict(root: nn.Module) -> list[Any]:
    """Makes `load_state_dict` safe on a sharded model, and returns the handles.

    It has to copy into the sharded main weights: `assign=True` would put tensors in their place
    that no buffer knows. After a load the model weights follow the main weights, as after a step.
    """

    def refuse_assign(
        module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "Expected load_state_dict(assign=False) of a model under MFSDP v2, got "
                "assign=True: its parameters are views of sharded buffers."
            )

    def refresh(module: nn.Module, _: Any) -> None:
        for _name, submodule in module.named_modules():
            if is_fsdp_module(submodule):
                for group in submodule._parameter_groups:
                    group.sync_model_weight_from_main_weight()

    return [
        root.register_load_state_dict_pre_hook(refuse_assign),
        root.register_load_state_dict_post_hook(refresh),
    ]
