"""Cases of group A: hooks that do not fire, or fire at the wrong time."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from sim.cases import kernels_hooks, kernels_models, kernels_source
from sim.cases.base import Case, Shown
from sim.cases.gathers import check_reductions
from sim.cases.worlds import SMALL, all_of, clean, replaced, run_scenario

_PULL: Final = "https://github.com/NVIDIA/Megatron-LM/pull"
_SCHEDULER: Final = "real.hooks.scheduler.UnitScheduler"
_ADAPTER: Final = "real.mcore.schedule.Mfsdp1F1B"

MTP: Final = SMALL.changed(mtp_num_layers=1, transformer_impl="transformer_engine")
TIED: Final = SMALL.changed(untie_embeddings_and_output_weights=False, num_microbatches=1)
FROZEN: Final = SMALL.changed(freeze="decoder.layers.0.*")


def _hooks_on_units_alone() -> AbstractContextManager[None]:
    """Layers are hooked as a whole, and the schedule calls none of them as a whole."""

    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            plan = original(*args, **kwargs)
            demand = tuple(d for d in plan.demand if not d.unit or d.module == d.unit)
            return dataclasses.replace(plan, demand=demand)

        return build

    return replaced("real.mcore.schedule.build_plan", make)


def _own_hooks_alone() -> AbstractContextManager[None]:
    """MFSDP as it is released: nothing joins it to the combined schedule."""
    return replaced(f"{_ADAPTER}.install", lambda _: lambda adapter: None)


def _root_callback_from_the_schedule() -> AbstractContextManager[None]:
    """The schedule does what MFSDP's own pre_backward() does, before any backward runs."""

    def make(_: Any) -> Any:
        return lambda adapter: adapter.module.context.register_post_backward_final_callback()

    return replaced(f"{_ADAPTER}.pre_backward", make)


def _no_final_wait() -> AbstractContextManager[None]:
    """Autograd's final callback would have made the wait, and does not run on this path."""
    return replaced("real.hooks.scheduler.ordering.join_reduce_scatter", lambda _: lambda _: None)


def _final_callback(*, knows_its_window: bool) -> AbstractContextManager[None]:
    """Each backward use of the root also queues autograd's callback that finishes the root.

    Args:
        knows_its_window: The callback does nothing when its window is finished already.
    """

    def make(original: Any) -> Any:
        def pre_backward(scheduler: Any, name: str, module: str) -> None:
            original(scheduler, name, module)
            if not name:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: finish(scheduler))

        return pre_backward

    def finish(scheduler: Any) -> None:
        from real.hooks.lifecycle import UnitEvent

        root = scheduler.units[""]
        if not root.is_complete or knows_its_window:
            return
        root.lifecycle.step(UnitEvent.BACKWARD_USE, "final callback")
        scheduler._close_backward(root, "final callback")
        root.unit.reduce_gradients()  # without the scheduler's check, which would refuse first

    return replaced(f"{_SCHEDULER}.pre_backward", make)


def _armed_by_forward_alone() -> AbstractContextManager[None]:
    """A countdown that has come to its end is armed again by the unit's next forward alone."""

    def make(original: Any) -> Any:
        def count(countdown: Any, parameter: str) -> bool:
            is_last: bool = original(countdown, parameter)
            if is_last:
                countdown._left = dict.fromkeys(countdown._left, 0)
            return is_last

        return count

    def make_hook(original: Any) -> Any:
        def pre_forward(scheduler: Any, name: str, module: str) -> None:
            original(scheduler, name, module)
            scheduler.units[name].countdown.rearm()

        return pre_forward

    return all_of(
        replaced("real.hooks.completion.GradientCountdown.count", make),
        replaced(f"{_SCHEDULER}.pre_forward", make_hook),
    )


def _one_fire_each() -> AbstractContextManager[None]:
    """A weight that several nodes use is declared to fire once."""

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: dataclasses.replace(original(*args, **kwargs), fires={})

    return replaced("real.mcore.schedule.find_consumers", make)


def _no_borrowers() -> AbstractContextManager[None]:
    """A module that computes with another's weight gets no hook: it owns no parameter."""

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: dataclasses.replace(original(*args, **kwargs), borrowers={})

    return replaced("real.mcore.schedule.find_consumers", make)


def _root_released_after_its_forward(job: Any) -> None:
    """The root's weights go when the last node of a forward has used them."""
    scheduler = job.model.scheduler
    job.model.module.output_layer.register_forward_hook(
        lambda *_: scheduler.release_forward([""], "post_process forward")
    )


def _frozen_units_complete_by_gradients() -> AbstractContextManager[None]:
    """Only a gradient ends a backward use, and a frozen unit has none."""

    def make(original: Any) -> Any:
        def release(scheduler: Any, names: Any, cause: str) -> None:
            original(scheduler, [n for n in names if scheduler.units[n].is_trainable], cause)

        return release

    return replaced(f"{_SCHEDULER}.release_backward", make)


def _no_zero_fill() -> AbstractContextManager[None]:
    """A unit whose owned parameters did not all take part is reduced as it is."""

    def make(_: Any) -> Any:
        def leave(scheduler: Any, unit: Any, cause: str) -> int:
            unit.countdown.rearm()
            return 0

        return leave

    return replaced(f"{_SCHEDULER}._zero_fill", make)


def _backward_hook_once_a_step() -> AbstractContextManager[None]:
    """The backward hook of a unit runs once, until the whole backward has ended."""

    def make(original: Any) -> Any:
        def pre_backward(scheduler: Any, name: str, module: str) -> None:
            unit = scheduler.units[name]
            if getattr(unit, "has_reduced", False):
                return
            original(scheduler, name, module)

        return pre_backward

    def make_finish(original: Any) -> Any:
        def finish(scheduler: Any, unit: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, unit, *args, **kwargs)
            unit.has_reduced = True

        return finish

    return all_of(
        replaced(f"{_SCHEDULER}.pre_backward", make),
        replaced(f"{_SCHEDULER}._finish_backward", make_finish),
    )


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="A1",
        source=f"{_PULL}/3797",
        title="The schedule calls the parts of a layer, so hooks on the layer gather nothing.",
        rules=("I1", "I3"),
        unit="decoder.layers.0",
        node="pre_dispatch_computation forward of layer 1",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="layers are hooked as a whole",
        twin="every module that owns a parameter is hooked",
        faulty=lambda: run_scenario(SMALL, defect=_hooks_on_units_alone),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="A2",
        source=f"{_PULL}/4990",
        title="A container computes with its children's weights and calls no child.",
        rules=("I1",),
        unit="decoder.layers.0.mlp",
        node="mlp forward of decoder.layers.0",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="hooks on the owners of parameters alone",
        twin="the container is declared to use its unit",
        faulty=lambda: kernels_hooks.container(is_declared=False),
        correct=lambda: kernels_hooks.container(is_declared=True),
    ),
    Case(
        id="A4",
        source=f"{_PULL}/6484",
        title="The schedule calls pre_backward() outside of autograd, which takes no callback.",
        rules=("I8",),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="MFSDP's pre_backward() of the root is called before a combined step",
        twin="the reduce-scatter stream is forked and no callback is queued",
        faulty=lambda: run_scenario(SMALL, defect=_root_callback_from_the_schedule),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="A5",
        source=f"{_PULL}/7112",
        title="The final callback does not run, so gradients are read while they are reduced.",
        rules=("I8",),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="nobody waits for the reduce-scatter stream",
        twin="finish_grad_sync() waits once, after all producers",
        faulty=lambda: run_scenario(SMALL, defect=_no_final_wait),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="A6",
        source=f"{_PULL}/6605",
        title="A callback of autograd finishes the root again after the schedule has finished it.",
        rules=("I5",),
        unit="<root>",
        node="pre_process backward",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="the callback does not know that its window is over",
        twin="the callback does nothing in a window that is finished",
        faulty=lambda: run_scenario(MTP, defect=lambda: _final_callback(knows_its_window=False)),
        correct=lambda: run_scenario(MTP, defect=lambda: _final_callback(knows_its_window=True)),
    ),
    Case(
        id="A8",
        source=f"{_PULL}/6949",
        title="The readiness counter is reset by a forward alone, and a backward follows another.",
        rules=("I5",),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="a completed countdown is not armed again",
        twin="it is armed where it completes",
        faulty=lambda: run_scenario(SMALL, defect=_armed_by_forward_alone),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="A9",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7166",
        title="With a prediction layer the embedding fires twice, and stands for the final norm.",
        rules=("I5", "I6"),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="every weight is declared to fire once",
        twin="each parameter's number of nodes is declared",
        faulty=lambda: run_scenario(MTP, defect=_one_fire_each, checks=[check_reductions]),
        correct=lambda: run_scenario(MTP, checks=[check_reductions]),
    ),
    Case(
        id="A11",
        source=f"{_PULL}/7582",
        title="The backward of a tied output projection reads the embedding's released weight.",
        rules=("I1",),
        unit="<root>",
        node="post_process backward",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="the projection owns no parameter and gets no hook",
        twin="the projection is hooked for the embedding's unit",
        faulty=lambda: run_scenario(
            TIED, defect=_no_borrowers, change=_root_released_after_its_forward
        ),
        correct=lambda: run_scenario(TIED, change=_root_released_after_its_forward),
    ),
    Case(
        id="A12",
        source="https://github.com/NVIDIA/Megatron-LM",
        title="The scheduler imports the prediction layer at module level, and is imported by it.",
        rules=(kernels_source.IMPORT_CYCLE,),
        unit=None,
        shown=Shown.SOURCE,
        defect="the import stands at the top of the released schedule plan",
        twin="the released schedule plan and our adapter as they are",
        faulty=kernels_source.import_at_module_level,
        correct=kernels_source.imports_as_released,
    ),
    Case(
        id="A13",
        source=f"{_PULL}/5710",
        title="A frozen unit has no gradient to complete it and never leaves its backward.",
        rules=("I3", "I18"),
        unit="decoder.layers.0",
        shown=Shown.SCENARIO,
        defect="only gradients end a backward use",
        twin="the layer's last backward node ends it",
        faulty=lambda: run_scenario(FROZEN, defect=_frozen_units_complete_by_gradients),
        correct=lambda: list(clean(FROZEN)),
    ),
    Case(
        id="A15",
        source=f"{_PULL}/7112",
        title="Without an input gradient a module's backward hook comes before its reads.",
        rules=("I4",),
        unit="first",
        node="first backward",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="the unit is released by its module's full-backward hook",
        twin="it is released by its last gradient",
        faulty=lambda: kernels_hooks.no_input_gradient(is_released_by_module_hook=True),
        correct=lambda: kernels_hooks.no_input_gradient(is_released_by_module_hook=False),
    ),
    Case(
        id="A17",
        source="https://github.com/NVIDIA/Megatron-LM",
        title="A weight that some microbatches do not use keeps its unit from completing.",
        rules=("I5", "I6", "I12"),
        unit="decoder.layers.0",
        shown=Shown.SCENARIO,
        defect="a gradient that did not come is not made zero",
        twin="it is made zero on every rank",
        faulty=lambda: kernels_models.sometimes_used(SMALL, defect=_no_zero_fill),
        correct=lambda: kernels_models.sometimes_used(SMALL),
    ),
    Case(
        id="A19",
        source="https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py",
        title="A recomputed forward stops early: its pre-forward hook runs, its post-forward not.",
        rules=("I18",),
        unit="layers.0",
        shown=Shown.KERNEL,
        defect="the released hooks open a profiler range in one and close it in the other",
        twin="our hooks close a range where they open it",
        faulty=lambda: kernels_hooks.checkpointed(has_own_hooks=True),
        correct=lambda: kernels_hooks.checkpointed(has_own_hooks=False),
    ),
    Case(
        id="A21",
        source="https://github.com/facebookresearch/fairscale/issues/918",
        title="Two forwards, then two backwards: a backward hook that runs once misses the second.",
        rules=("I1", "I3"),
        unit="<root>",
        node="post_process backward",
        microbatch=1,
        shown=Shown.SCENARIO,
        defect="the guard of the backward hook is reset at the end of the whole backward",
        twin="every forward has a backward use of its own",
        faulty=lambda: run_scenario(SMALL, defect=_backward_hook_once_a_step),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="A23",
        source="https://github.com/pytorch/pytorch/issues/125394",
        title="A method other than forward() computes with the weights and runs no hook.",
        rules=("I1",),
        unit="decoder.layers.0",
        node="attn forward of decoder.layers.0",
        microbatch=0,
        shown=Shown.KERNEL,
        defect="the schedule calls the method directly",
        twin="the method is registered to run as the module's forward",
        faulty=lambda: kernels_hooks.other_method(is_registered=False),
        correct=lambda: kernels_hooks.other_method(is_registered=True),
    ),
    Case(
        id="A24",
        source="https://github.com/pytorch/pytorch/issues/86343",
        title="Submodules of an FSDP unit are run by themselves, as the combined schedule does.",
        rules=("I1",),
        unit="<root>",
        node="pre_process forward",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="MFSDP's own hooks alone, as released",
        twin="our hooks in their place",
        faulty=lambda: run_scenario(SMALL, defect=_own_hooks_alone),
        correct=lambda: list(clean(SMALL)),
    ),
)
"""In the order of their ids."""
