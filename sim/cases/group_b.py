"""Cases of group B: weight gradients that come later than autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from sim.cases import kernels_fused, kernels_wgrad
from sim.cases.base import Case, Shown
from sim.cases.ordering import OVERLAP
from sim.cases.worlds import SMALL, clean, replaced, run_scenario

_PULL: Final = "https://github.com/NVIDIA/Megatron-LM/pull"

DELAYED: Final = SMALL.changed(transformer_impl="transformer_engine", delay_wgrad_compute=True)
SHARED_EXPERT: Final = DELAYED.changed(moe_shared_expert_intermediate_size=16)


def _counted_by_autograd() -> AbstractContextManager[None]:
    """Parameters with a delayed gradient are counted where autograd accumulates, too."""

    def make(_: Any) -> Any:
        def register(module: Any, hook: Any) -> Any:
            unit = hook.scheduler().units[hook.unit].unit
            parameter = unit.trainable_parameters[hook.subject]
            return parameter.register_post_accumulate_grad_hook(hook).remove

        return register

    return replaced("real.hooks.install._register_delayed", make)


def _shared_expert_forgotten() -> AbstractContextManager[None]:
    """The delayed hooks of the shared expert are dropped: another node than mlp collects them."""

    def make(original: Any) -> Any:
        def register(module: Any, hook: Any) -> Any:
            if "shared_experts" in hook.subject:
                return lambda: None
            return original(module, hook)

        return register

    return replaced("real.hooks.install._register_delayed", make)


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="B1",
        source=f"{_PULL}/6697",
        title="A unit is reduced before its delayed weight gradient exists.",
        rules=("I7",),
        unit="decoder.layers.1",
        node="pre_dispatch_computation backward of layer 2",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="autograd's accumulation counts for weights with a delayed gradient",
        twin="Transformer Engine's own call counts for them",
        faulty=lambda: run_scenario(DELAYED, defect=_counted_by_autograd),
        correct=lambda: list(clean(DELAYED)),
    ),
    Case(
        id="B2",
        source=f"{_PULL}/3797",
        title="The hook of a shared expert's delayed weight gradient is dropped.",
        rules=("I5",),
        unit="decoder.layers.1",
        shown=Shown.SCENARIO,
        defect="its weights are not among those that the node collected",
        twin="every weight with a delayed gradient is hooked when the model is wrapped",
        faulty=lambda: run_scenario(SHARED_EXPERT, defect=_shared_expert_forgotten),
        correct=lambda: list(clean(SHARED_EXPERT)),
    ),
    Case(
        id="B4",
        source=f"{_PULL}/6949",
        title="A float32 weight gradient cannot be assigned to a bf16 parameter.",
        rules=("I13",),
        unit="layer",
        node="mlp wgrad of layer",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="the parameter's gradient has to have the parameter's type",
        twin="its type is unconstrained for weights with a delayed gradient",
        faulty=lambda: kernels_wgrad.wide_gradient(is_unconstrained=False),
        correct=lambda: kernels_wgrad.wide_gradient(is_unconstrained=True),
    ),
    Case(
        id="B5",
        source="https://github.com/NVIDIA/TransformerEngine/issues/3437",
        title="A delayed weight gradient of a weight that is used twice is not accumulated.",
        rules=("I13",),
        unit="layer",
        shown=Shown.KERNEL,
        defect="the second delayed gradient takes the place of the first",
        twin="the same weight without delay: autograd sums",
        faulty=lambda: kernels_wgrad.used_twice(is_delayed=True),
        correct=lambda: kernels_wgrad.used_twice(is_delayed=False),
    ),
    Case(
        id="B7",
        source="https://github.com/NVIDIA/Megatron-LM",
        title="Ordinary unused weights complete a unit whose delayed gradient is pending.",
        rules=("I7", "I11"),
        unit="layer",
        shown=Shown.KERNEL,
        defect="the countdown leaves weights with a delayed gradient out",
        twin="the unit stays open until the delayed gradient has come",
        faulty=lambda: kernels_wgrad.pending_callback(is_counted=False),
        correct=lambda: kernels_wgrad.pending_callback(is_counted=True),
    ),
    Case(
        id="B8",
        source=f"{_PULL}/3164",
        title="A weight gradient runs outside its node's stream and reads inputs in no order.",
        rules=("I1", "I4"),
        unit="layer",
        node="mlp wgrad of layer",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="it runs on a stream that has waited for nothing",
        twin="it runs on the node's stream",
        faulty=lambda: kernels_wgrad.wgrad_stream(is_node_stream=False),
        correct=lambda: kernels_wgrad.wgrad_stream(is_node_stream=True),
    ),
    Case(
        id="B10",
        source=f"{_PULL}/3795",
        title="The shared expert's backward holds back the routed experts' weight gradient.",
        rules=(OVERLAP,),
        unit="layer",
        node="mlp wgrad of layer",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="the weight gradient's stream waits for the shared expert's",
        twin="it waits for the input gradient alone",
        faulty=lambda: kernels_wgrad.wgrad_start(waits_for_shared_expert=True),
        correct=lambda: kernels_wgrad.wgrad_start(waits_for_shared_expert=False),
    ),
    Case(
        id="B12",
        source=f"{_PULL}/7101",
        title="Two fused paths overwrite each other's gradient of one weight.",
        rules=("I13",),
        unit="<root>",
        shown=Shown.KERNEL,
        defect="every path of the first microbatch overwrites the buffer",
        twin="the first path overwrites, the others add",
        faulty=lambda: kernels_fused.fused_paths(knows_first_path=False),
        correct=lambda: kernels_fused.fused_paths(knows_first_path=True),
    ),
    Case(
        id="B13",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1129",
        title="The hook of a gradient runs in a thread that is not the rank's.",
        rules=("I16",),
        unit="layer",
        shown=Shown.KERNEL,
        defect="the weight gradient and its hook run in a background thread",
        twin="they run in the rank's own thread",
        faulty=lambda: kernels_wgrad.hook_thread(is_own_thread=False),
        correct=lambda: kernels_wgrad.hook_thread(is_own_thread=True),
    ),
)
"""In the order of their ids."""
