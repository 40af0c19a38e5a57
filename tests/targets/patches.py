"""Patches of what is under test, for the length of a run: repairs of a tree, and mistakes.

`python -m tests.targets.patches NAME[,NAME] run --target ...` is `python -m sim run --target ...`
with them. No file of a tree is changed or kept: each patch replaces a method of an imported class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from real.targets import base

Patch = Callable[[], None]


def main(argv: list[str]) -> int:
    """Runs `sim` with the patches that the first word names."""
    from sim.cli import main as sim_main

    names, *words = argv
    target = words[words.index("--target") + 1].partition(":")[0]
    base._TARGETS[target] = _patched(base._TARGETS[target], names.split(","))
    return sim_main(words)


def _patched(make: Callable[[str], Any], names: list[str]) -> Callable[[str], Any]:
    """Returns a target's factory that patches, once, what it has imported."""
    open_names = list(names)

    def make_patched(variant: str) -> Any:
        target = make(variant)
        while open_names:
            PATCHES[open_names.pop(0)]()
        return target

    return make_patched


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


# -- a tree that joins MFSDP v2 itself -------------------------------------------------------------


def _module() -> Any:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import module

    return module


def _wrapper() -> Any:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    return mcore_fsdp_adapter.FullyShardedDataParallelV2


def _wait_for_the_last_reductions() -> None:
    def finish_grad_sync(self: Any, *_: Any, **__: Any) -> None:
        context = self.module.context
        context.current_stream().wait_stream(context.reduce_scatter_stream)

    _wrapper().finish_grad_sync = finish_grad_sync


def _order_gathers_after_casts() -> None:
    """The first gather of a step waits for what the current stream has done, as a cast."""
    module = _module()

    def ordered(method: Any) -> Any:
        def unshard(self: Any) -> None:
            if self._name == "" and self._unshard_event is None:
                self.context.allgather_stream.wait_stream(torch.cuda.current_stream())
            method(self)

        return unshard

    _replace(module.FsdpModule, "_unshard_parameter_groups", ordered)


def _do_not_prefetch_in_a_fine_grained_backward() -> None:
    """A layer's experts are done before it, and nothing would release them again."""
    module = _module()

    def without(method: Any) -> Any:
        def pre_backward(self: Any, register_final_callback: bool = True) -> None:
            if register_final_callback:
                method(self, register_final_callback)
                return
            order = self.context.backward_order
            next_item, order.next_item = order.next_item, lambda _: None
            try:
                method(self, register_final_callback=False)
            finally:
                order.next_item = next_item

        return pre_backward

    _replace(module.FsdpModule, "pre_backward", without)


def _hook_only_modules_with_parameters() -> None:
    module = _module()

    def guarded(hook: Any) -> Any:
        def pre_backward_hook(submodule: nn.Module, grad_output: Any) -> None:
            if next(submodule.parameters(), None) is not None:
                hook(submodule, grad_output)

        return pre_backward_hook

    _replace(module, "_fine_grained_pre_backward_hook", guarded)


def _release_nothing_in_backward(*, experts_too: bool = False) -> None:
    module = _module()

    def guarded(setup: Any) -> Any:
        def setup_interface(self: Any) -> None:
            setup(self)

            def release(layer: nn.Module) -> None:
                for unit in layer.modules() if experts_too else [layer]:
                    is_unit = isinstance(unit, module.FsdpModule)
                    if is_unit and unit.phase is not module.FsdpModule.Phase.BACKWARD:
                        unit._reshard_parameter_groups()

            self.post_forward_release_module = release

        return setup_interface

    _replace(_wrapper(), "_setup_1f1b_overlap_interface", guarded)


def _release_experts_too() -> None:
    _release_nothing_in_backward(experts_too=True)


# -- mistakes: one each ----------------------------------------------------------------------------


def _leave_out_the_wait_for_a_gather() -> None:
    """Of layer 1, in a fine-grained forward."""
    module = _module()

    def hook(submodule: nn.Module, _args: Any, _kwargs: Any) -> None:
        target = module._find_fsdp_target(submodule)
        if target is None:
            return
        target._unshard_parameter_groups()
        if target._name != "decoder.layers.1":
            target.context.current_stream().wait_event(target._unshard_event)

    module._fine_grained_pre_forward_hook = hook


def _release_too_early() -> None:
    """Of all units: the stream that releases waits for no reader."""
    module = _module()

    def reshard(self: Any) -> None:
        for group in self._parameter_groups:
            group.reshard_parameters()
        with torch.cuda.stream(self.context.allgather_stream):
            for group in self._parameter_groups:
                group.release_unsharded_storage()
            self._unshard_event = None

    module.FsdpModule._reshard_parameter_groups = reshard


def _reduce_twice() -> None:
    """Layer 1, with the same gradients."""
    module = _module()

    def twice(method: Any) -> Any:
        def post_backward(self: Any) -> None:
            is_due = self._name == "decoder.layers.1" and (
                self.phase is module.FsdpModule.Phase.BACKWARD
            )
            gradients = _gradients(self) if is_due else []
            method(self)
            if is_due:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                self._reduce_gradient_groups()

        return post_backward

    _replace(module.FsdpModule, "post_backward", twice)


def _gradients(unit: Any) -> list[tuple[Any, Any]]:
    parameters = (
        parameter.unsharded
        for group in unit._parameter_groups
        for parameter in group.fsdp_parameters
    )
    return [(parameter, parameter.grad) for parameter in parameters]


# -- mistakes in MFSDP v1 --------------------------------------------------------------------------


def _pipelines() -> Any:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    return param_and_grad_buffer


def _leave_out_the_wait_of_v1() -> None:
    """Layer 1's gathers are taken as done."""

    def without(method: Any) -> Any:
        def wait(self: Any, bucket_id: int, bwd: bool, empty_ok: bool = False) -> None:
            key = self.get_bucket_key(bucket_id, bwd)
            if key in self.param_gather_event_map and _is_layer_1(self, bucket_id):
                _, mark_ready = self.param_gather_event_map.pop(key)
                mark_ready()
            method(self, bucket_id, bwd, empty_ok)

        return wait

    _replace(_pipelines().AllGatherPipeline, "wait_bucket_ready", without)


def _release_too_early_in_v1() -> None:
    """Of all units: the stream that gathers, and so takes their memory again, waits for no use."""

    def unordered(method: Any) -> Any:
        def gather(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.ag_stream.wait_stream = lambda _: None
            try:
                return method(self, *args, **kwargs)
            finally:
                del self.ag_stream.wait_stream

        return gather

    _replace(_pipelines().AllGatherPipeline, "all_gather_params", unordered)


def _reduce_twice_in_v1() -> None:
    """Layer 1, with what its buffer holds then."""

    def twice(method: Any) -> Any:
        def reduce(self: Any, bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
            if _is_layer_1(self, bucket_group[0]) and self not in _again:
                _again.append(self)
                self._bucket_group_gradient_reduce(bucket_group, *args, **kwargs)
                _again.remove(self)
            return method(self, bucket_group, *args, **kwargs)

        return reduce

    _replace(_pipelines().GradReducePipeline, "_bucket_group_gradient_reduce", twice)


_again: list[Any] = []
"""Whose second reduction is going on."""


def _is_layer_1(pipeline: Any, bucket_id: int) -> bool:
    from real.targets.internals import mfsdp1

    return mfsdp1._buckets_in(pipeline.buffer)[bucket_id].unit == "decoder.layers.1"


# -- the host --------------------------------------------------------------------------------------


def _do_not_wait_while_building() -> None:
    """Megatron's optimizer gathers names of parameters, and the host waits for that."""

    def all_gather_object(found: list[Any], own: Any, **_: Any) -> None:
        found[:] = [own] * len(found)

    torch.distributed.all_gather_object = all_gather_object


PATCHES: Final[dict[str, Patch]] = {
    "A": _wait_for_the_last_reductions,
    "B": _order_gathers_after_casts,
    "C": _do_not_prefetch_in_a_fine_grained_backward,
    "D": _hook_only_modules_with_parameters,
    "E": _release_experts_too,
    "F": _release_nothing_in_backward,
    "no-host-wait": _do_not_wait_while_building,
    "no-wait": _leave_out_the_wait_for_a_gather,
    "early-release": _release_too_early,
    "reduced-twice": _reduce_twice,
    "v1-no-wait": _leave_out_the_wait_of_v1,
    "v1-early-release": _release_too_early_in_v1,
    "v1-reduced-twice": _reduce_twice_in_v1,
}
"""Repairs by the letter of the fault that they mend, and mistakes."""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
