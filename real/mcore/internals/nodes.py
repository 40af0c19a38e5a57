"""Tells when Megatron runs a schedule node, and an adapter when a node has run backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import TransformerLayerNode
from megatron.core.pipeline_parallel.utils import ScheduleNode

_released_set_hooks = TransformerLayerSchedulePlan.set_fsdp_reshard_hooks
_told: Counter[type] = Counter()
"""How many adapters of each type are told now."""


class NodeCall(NamedTuple):
    """One run of a schedule node.

    Attributes:
        name: Megatron's name of the node.
        direction: "forward", "backward" or "wgrad".
        layer: "layer 3" counted from 1 as Megatron does, or None outside a layer.
        plan: Stands for the microbatch: equal for all nodes of one chunk plan.
        stream: The node's stream, or None before its first run.
        phase: "warmup" (forward alone), "steady" (forward and backward interleaved), "cooldown"
            (backward alone), or None outside a combined step.
        chunk: Virtual pipeline chunk, 0 without one.
    """

    name: str
    direction: str
    layer: str | None
    plan: object | None
    stream: Any
    phase: str | None
    chunk: int


def tell_backward_nodes(adapter_type: type) -> Callable[[], None]:
    """Makes the schedule tell adapters of the end of two backward nodes; returns what undoes it.

    The released schedule hooks the last backward node of a layer alone and says "release". An
    adapter is told, once for each microbatch, that `mlp` and `pre_dispatch_computation` have run
    backward: `post_backward_node(name, layer)`. A node with delayed weight gradients ends with the
    call that makes them. The replacement keeps no model and serves every type of adapter; the last
    undo restores the original.
    """

    def set_hooks(plan: Any, post_forward_hook: Any, post_backward_hook: Any) -> None:
        _released_set_hooks(plan, post_forward_hook, post_backward_hook)
        owner = getattr(post_backward_hook, "__self__", None)
        if not isinstance(owner, tuple(_told)):
            return
        adapter: Any = owner
        # A prediction layer wraps the transformer layer that is the unit.
        layer = getattr(plan.layer, "mtp_model_layer", plan.layer)
        release = plan.pre_dispatch_computation._post_backward_hook

        def end_layer() -> None:
            adapter.post_backward_node("pre_dispatch_computation", layer)
            release()

        plan.mlp.set_post_backward_hook(lambda: adapter.post_backward_node("mlp", layer))
        plan.pre_dispatch_computation.set_post_backward_hook(end_layer)

    if not _told:
        TransformerLayerSchedulePlan.set_fsdp_reshard_hooks = set_hooks
    _told[adapter_type] += 1
    is_telling = True

    def undo() -> None:
        nonlocal is_telling
        if is_telling:
            is_telling = False
            _told[adapter_type] -= 1
            if not _told[adapter_type]:
                del _told[adapter_type]
            if not _told:
                TransformerLayerSchedulePlan.set_fsdp_reshard_hooks = _released_set_hooks

    return undo


@contextmanager
def observed_nodes(
    before: Callable[[NodeCall], None], after: Callable[[NodeCall], None]
) -> Iterator[None]:
    """Calls `before` and `after` around every schedule node of the process."""
    build = TransformerLayerSchedulePlan._build_callable_nodes
    runs = {
        (ScheduleNode, "_forward"): "forward",
        (ScheduleNode, "_backward"): "backward",
        (TransformerLayerNode, "backward_dw"): "wgrad",
    }
    originals = {key: getattr(*key) for key in runs}
    run_step = TransformerModelChunkSchedulePlan.run

    def build_and_name(plan: Any, *args: Any, **kwargs: Any) -> None:
        build(plan, *args, **kwargs)
        for node in (plan.pre_dispatch_computation, plan.mlp, plan.moe_dispatch, plan.moe_combine):
            node.testbed_layer = f"layer {plan.layer.layer_number}"

    def run_and_tell_phase(f_plan: Any, b_plan: Any, *args: Any, **kwargs: Any) -> Any:
        phase = "cooldown" if f_plan is None else "warmup" if b_plan is None else "steady"
        for plan in (f_plan, b_plan):
            if plan is not None:
                plan._model_chunk_state.testbed_phase = phase
                plan._model_chunk_state.testbed_chunk = plan.vp_stage or 0
        return run_step(f_plan, b_plan, *args, **kwargs)

    def observe(owner: type, method: str) -> Callable[..., Any]:
        original, direction = originals[owner, method], runs[owner, method]

        def run(node: Any, *args: Any, **kwargs: Any) -> Any:
            if direction == "wgrad" and not node.delay_wgrad_compute:
                return original(node, *args, **kwargs)
            plan = getattr(node, "chunk_state", None)
            call = NodeCall(
                name=node.name,
                direction=direction,
                layer=getattr(node, "testbed_layer", None),
                plan=plan,
                stream=None if callable(node.stream) else node.stream,
                phase=getattr(plan, "testbed_phase", None),
                chunk=getattr(plan, "testbed_chunk", 0),
            )
            before(call)
            result = original(node, *args, **kwargs)
            after(call)
            return result

        return run

    TransformerLayerSchedulePlan._build_callable_nodes = build_and_name
    TransformerModelChunkSchedulePlan.run = staticmethod(run_and_tell_phase)
    for owner, method in runs:
        setattr(owner, method, observe(owner, method))
    try:
        yield
    finally:
        TransformerLayerSchedulePlan._build_callable_nodes = build
        TransformerModelChunkSchedulePlan.run = staticmethod(run_step)
        for (owner, method), original in originals.items():
            setattr(owner, method, original)
