"""Tells when Megatron runs a schedule node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class NodeCall(NamedTuple):
    """One run of a schedule node.

    Attributes:
        name: Megatron's name of the node.
        direction: "forward", "backward" or "wgrad".
        layer: "layer 3" counted from 1 as Megatron does, or None outside a layer.
        plan: Stands for the microbatch: equal for all nodes of one chunk plan.
        stream: The node's stream, or None before its first run.
    """

    name: str
    direction: str
    layer: str | None
    plan: object | None
    stream: Any


@contextmanager
def observed_nodes(
    before: Callable[[NodeCall], None], after: Callable[[NodeCall], None]
) -> Iterator[None]:
    """Calls `before` and `after` around every schedule node of the process."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.models.common.utils import TransformerLayerNode
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    build = TransformerLayerSchedulePlan._build_callable_nodes
    runs = {
        (ScheduleNode, "_forward"): "forward",
        (ScheduleNode, "_backward"): "backward",
        (TransformerLayerNode, "backward_dw"): "wgrad",
    }
    originals = {key: getattr(*key) for key in runs}

    def build_and_name(plan: Any, *args: Any, **kwargs: Any) -> None:
        build(plan, *args, **kwargs)
        for node in (plan.pre_dispatch_computation, plan.mlp, plan.moe_dispatch, plan.moe_combine):
            node.testbed_layer = f"layer {plan.layer.layer_number}"

    def observe(owner: type, method: str) -> Callable[..., Any]:
        original, direction = originals[owner, method], runs[owner, method]

        def run(node: Any, *args: Any, **kwargs: Any) -> Any:
            if direction == "wgrad" and not node.delay_wgrad_compute:
                return original(node, *args, **kwargs)
            call = NodeCall(
                name=node.name,
                direction=direction,
                layer=getattr(node, "testbed_layer", None),
                plan=getattr(node, "chunk_state", None),
                stream=None if callable(node.stream) else node.stream,
            )
            before(call)
            result = original(node, *args, **kwargs)
            after(call)
            return result

        return run

    TransformerLayerSchedulePlan._build_callable_nodes = build_and_name
    for owner, method in runs:
        setattr(owner, method, observe(owner, method))
    try:
        yield
    finally:
        TransformerLayerSchedulePlan._build_callable_nodes = build
        for (owner, method), original in originals.items():
            setattr(owner, method, original)
