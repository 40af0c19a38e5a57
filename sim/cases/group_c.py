"""Cases of group C: gathers and releases, once each, and nothing left behind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch

from sim.cases.base import Case, Shown
from sim.cases.gathers import check_frozen, check_gathers, check_loss_inputs
from sim.cases.ordering import OVERLAP, check_gather_overlap
from sim.cases.worlds import SMALL, all_of, clean, replaced, run_scenario

_PULL: Final = "https://github.com/NVIDIA/Megatron-LM/pull"
_SCHEDULER: Final = "real.hooks.scheduler.UnitScheduler"
_ADAPTER: Final = "real.mcore.schedule.Mfsdp1F1B"
_GROUP: Final = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group"
    ".FsdpParameterGroup"
)

PLAIN: Final = SMALL.changed(overlap_moe_expert_parallel_comm=False, fine_grained_hooks=True)
RECOMPUTE: Final = PLAIN.changed(
    transformer_impl="transformer_engine", recompute_granularity="full", prefetch="forward"
)
KEPT: Final = RECOMPUTE.changed(prefetch="none")
FROZEN: Final = SMALL.changed(num_layers=3, freeze="decoder.layers.1.*")
AHEAD: Final = SMALL.changed(prefetch="forward")
ODD: Final = SMALL.changed(num_layers=3, num_microbatches=3, moe_layer_freq="1,0,1")

_overlaps = partial(check_gather_overlap, units=["decoder.layers.1"])
_twice_and_collisions = partial(check_gathers, most=2, extra=2)
_once_a_window = partial(check_gathers, most=1)
_once_a_microbatch = partial(check_gathers, most=1, least=1, units=[""])


def _recompute_not_told_apart() -> AbstractContextManager[None]:
    """A recomputed forward is taken for a forward: it opens a use and prefetches."""
    return replaced("real.hooks.scheduler._is_inside_backward", lambda _: lambda: False)


def _release_after_recompute() -> AbstractContextManager[None]:
    """The end of a recomputed forward releases its units like that of any other forward."""

    def make(original: Any) -> Any:
        def post_forward(scheduler: Any, names: Any, module: str) -> None:
            original(scheduler, names, module)
            if torch._C._current_graph_task_id() != -1:
                for name in names:
                    scheduler._reshard(scheduler.units[name])

        return post_forward

    return replaced(f"{_SCHEDULER}.post_forward", make)


def _nothing(target: str) -> AbstractContextManager[None]:
    return replaced(target, lambda _: lambda *args, **kwargs: None)


def _gather_again() -> AbstractContextManager[None]:
    """Every hook gathers, whether or not the unit is unsharded."""

    def make(original: Any) -> Any:
        def gather(scheduler: Any, unit: Any) -> None:
            unit.unit.module._unshard_event = None
            original(scheduler, unit)

        return gather

    return replaced(f"{_SCHEDULER}._gather", make)


def _root_kept_under_no_sync() -> AbstractContextManager[None]:
    """The root is released by the last microbatch of a window alone."""

    def make(original: Any) -> Any:
        def reshard(scheduler: Any, unit: Any) -> None:
            if unit.name or scheduler.context.is_last_microbatch:
                original(scheduler, unit)

        return reshard

    return replaced(f"{_SCHEDULER}._reshard", make)


def _release_takes_the_rest_along() -> AbstractContextManager[None]:
    """The release of a layer also frees what belongs to no layer, and tells nobody."""

    def make(original: Any) -> Any:
        def release(adapter: Any, module: Any) -> None:
            original(adapter, module)
            for group in adapter.module._parameter_groups:
                group.release_unsharded_storage()

        return release

    return replaced(f"{_ADAPTER}.post_forward_release_module", make)


def _no_lookahead() -> AbstractContextManager[None]:
    """No unit knows which comes after it."""
    return _nothing(f"{_SCHEDULER}._link")


def _release_despite_backward() -> AbstractContextManager[None]:
    """The forward's release frees a layer whose backward is open, and an open one gathers nothing.

    The middle layer of an odd number is in forward and in backward in the same combined step. Here
    it is dense: its backward reads the layer's weights before and after the other's last node.
    """

    def make_release(original: Any) -> Any:
        def release(scheduler: Any, names: Any, cause: str) -> None:
            from real.hooks import UnitPhase

            for name in names:
                if scheduler.units[name].lifecycle.phase is UnitPhase.BOTH:
                    scheduler._reshard(scheduler.units[name])
            original(scheduler, names, cause)

        return release

    def make_hook(original: Any) -> Any:
        def pre_backward(scheduler: Any, name: str, module: str) -> None:
            from real.hooks import UnitPhase

            if scheduler.units[name].lifecycle.phase is not UnitPhase.BACKWARD:
                original(scheduler, name, module)

        return pre_backward

    return all_of(
        replaced(f"{_SCHEDULER}.release_forward", make_release),
        replaced(f"{_SCHEDULER}.pre_backward", make_hook),
    )


def _reduce_inputs_kept() -> AbstractContextManager[None]:
    """The inputs of reductions are kept until the end of the run."""
    kept = []

    def make(original: Any) -> Any:
        def allocate(group: Any) -> Any:
            buffer = original(group)
            kept.append(buffer)
            return buffer

        return allocate

    return replaced(f"{_GROUP}.allocate_partial_grad_buffer", make)


def _kept_after_forward() -> AbstractContextManager[None]:
    """Nothing ends a forward use but the unit's backward: weights are gathered once (ZeRO-2)."""

    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "layers": ()})

        return build

    return all_of(
        replaced("real.mcore.schedule.build_plan", make), _nothing(f"{_SCHEDULER}.post_forward")
    )


def _prefetch_before_the_wait() -> AbstractContextManager[None]:
    """The next gather is issued first, and compute waits for the whole all-gather stream."""

    def make(original: Any) -> Any:
        def unshard(scheduler: Any, unit: Any, event: Any, cause: str) -> None:
            from real.hooks.lifecycle import UnitEvent

            scheduler._gather(unit)
            if event is UnitEvent.FORWARD_USE and unit.next_forward is not None:
                scheduler._prefetch(unit.next_forward, event, cause)
            original(scheduler, unit, event, cause)

        return unshard

    def make_join(_: Any) -> Any:
        def join(unit: Any) -> None:
            torch.cuda.current_stream().wait_stream(unit.module.context.allgather_stream)

        return join

    return all_of(
        replaced(f"{_SCHEDULER}._unshard", make),
        replaced("real.hooks.scheduler.ordering.join_unshard", make_join),
    )


def _restored_by_copy(*, is_counted: bool) -> AbstractContextManager[None]:
    """A gather copies into the full parameters, whose views autograd has saved.

    Args:
        is_counted: The copy counts as a change, like any other in-place operation.
    """

    def make(original: Any) -> Any:
        def unshard(group: Any) -> None:
            original(group)
            parameters = tuple(group.unsharded_parameters)
            values = [parameter.detach().clone() for parameter in parameters]
            keep = torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
                parameters
            )
            with torch.no_grad(), nullcontext() if is_counted else keep:
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)

        return unshard

    return replaced(f"{_GROUP}.unshard_parameters", make)


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="C1",
        source=f"{_PULL}/6153",
        title="A recomputed forward prefetches a unit whose backward is over; it stays gathered.",
        rules=("I3", "I17"),
        unit="decoder.layers.1",
        shown=Shown.SCENARIO,
        defect="a recomputed forward is taken for a forward",
        twin="it is told by autograd's graph task",
        faulty=lambda: run_scenario(RECOMPUTE, defect=_recompute_not_told_apart),
        correct=lambda: list(clean(RECOMPUTE)),
    ),
    Case(
        id="C2",
        source="https://github.com/pytorch/pytorch/issues/164009",
        title="The end of a recomputed forward releases the unit that backward is about to read.",
        rules=("I2", "I17"),
        unit="decoder.layers.1",
        shown=Shown.SCENARIO,
        defect="the post-forward hook releases inside a backward",
        twin="it does nothing there",
        faulty=lambda: run_scenario(RECOMPUTE, defect=_release_after_recompute),
        correct=lambda: list(clean(RECOMPUTE)),
    ),
    Case(
        id="C5",
        source="https://github.com/pytorch/pytorch/issues/101982",
        title="Frozen units stay gathered for the whole backward.",
        rules=("I3", "I20"),
        unit="decoder.layers.1",
        node="pre_dispatch_computation backward of layer 2",
        microbatch=1,
        shown=Shown.SCENARIO,
        defect="nothing but the end of the backward releases a unit without gradients",
        twin="the layer's last backward node does",
        faulty=lambda: run_scenario(
            FROZEN,
            defect=lambda: _nothing(f"{_ADAPTER}.post_backward_release_module"),
            checks=[check_frozen],
        ),
        correct=lambda: run_scenario(FROZEN, checks=[check_frozen]),
    ),
    Case(
        id="C6",
        source="https://github.com/pytorch/pytorch/issues/90201",
        title="Several hooks of one unit gather it once each.",
        rules=("I2",),
        unit="decoder.layers.0",
        node="pre_dispatch_computation forward of layer 1",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="a gather does not look whether the unit is unsharded",
        twin="repeated calls gather once",
        faulty=lambda: run_scenario(SMALL, defect=_gather_again),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="C8",
        source="https://github.com/pytorch/pytorch/issues/75901",
        title="Under no_sync the root is not freed, so gathers differ between microbatches.",
        rules=("I3", "I12"),
        unit="<root>",
        shown=Shown.SCENARIO,
        defect="only the last microbatch releases the root",
        twin="every microbatch does",
        faulty=lambda: run_scenario(
            SMALL, defect=_root_kept_under_no_sync, checks=[_once_a_microbatch]
        ),
        correct=lambda: run_scenario(SMALL, checks=[_once_a_microbatch]),
    ),
    Case(
        id="C11",
        source=f"{_PULL}/4717",
        title="The weights of modules outside of all layers are freed with a layer's.",
        rules=("I1",),
        unit="<root>",
        node="moe_combine forward of layer 2",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="the release of a layer frees the root's storage, and the root counts as gathered",
        twin="a release frees the units of its layer",
        faulty=lambda: run_scenario(SMALL, defect=_release_takes_the_rest_along),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="C12",
        source=f"{_PULL}/4909",
        title="The inputs of the loss node stay in memory after their backward.",
        rules=("I20",),
        unit="<root>",
        node="pre_process backward",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="the schedule does not release them after the combined step",
        twin="it does, as released",
        faulty=lambda: run_scenario(
            SMALL,
            defect=lambda: _nothing(
                "megatron.core.pipeline_parallel.combined_1f1b._release_tensor_storage"
            ),
            checks=[check_loss_inputs],
        ),
        correct=lambda: run_scenario(SMALL, checks=[check_loss_inputs]),
    ),
    Case(
        id="C14",
        source=f"{_PULL}/6484",
        title="The next gather stands behind the last release on its stream and overlaps nothing.",
        rules=(OVERLAP,),
        unit="decoder.layers.1",
        shown=Shown.SCENARIO,
        defect="units are gathered on demand although prefetch is on",
        twin="each forward use issues the next gather",
        faulty=lambda: run_scenario(AHEAD, defect=_no_lookahead, checks=[_overlaps]),
        correct=lambda: run_scenario(AHEAD, checks=[_overlaps]),
    ),
    Case(
        id="C15",
        source=f"{_PULL}/3796",
        title="The middle layer's forward release comes before its own backward has read it.",
        rules=("I1",),
        unit="decoder.layers.1",
        node="pre_dispatch_computation backward of layer 2",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="the release does not know of the open backward",
        twin="a unit goes when its last open interval closes",
        faulty=lambda: run_scenario(
            ODD, defect=_release_despite_backward, checks=[_twice_and_collisions]
        ),
        correct=lambda: run_scenario(ODD, checks=[_twice_and_collisions]),
    ),
    Case(
        id="C17",
        source="https://github.com/ISEEKYAN/Megatron-LM/issues/158",
        title="The inputs of all layers' reductions are alive at once.",
        rules=("I20",),
        unit="decoder.layers.1",
        node="pre_dispatch_computation backward of layer 2",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="they are kept until the end of the step",
        twin="each goes when its reduction has been launched",
        faulty=lambda: run_scenario(SMALL, defect=_reduce_inputs_kept),
        correct=lambda: list(clean(SMALL)),
    ),
    Case(
        id="C19",
        source="https://github.com/Robbyant/lingbot-vla/issues/50",
        title="Weights that are to stay gathered after a forward go, and recompute gathers again.",
        rules=("I2",),
        unit="decoder.layers.0",
        shown=Shown.SCENARIO,
        defect="the end of a forward releases whatever the policy",
        twin="a unit stays gathered from its forward to the end of its backward",
        faulty=lambda: run_scenario(KEPT, checks=[_once_a_window]),
        correct=lambda: run_scenario(KEPT, defect=_kept_after_forward, checks=[_once_a_window]),
    ),
    Case(
        id="C21",
        source="https://github.com/pytorch/pytorch/issues/163153",
        title="The next gather is issued early, and compute waits for it all the same.",
        rules=(OVERLAP,),
        unit="decoder.layers.1",
        shown=Shown.SCENARIO,
        defect="compute waits for the all-gather stream, not for its own gather",
        twin="compute waits for its own gather's event",
        faulty=lambda: run_scenario(AHEAD, defect=_prefetch_before_the_wait, checks=[_overlaps]),
        correct=lambda: run_scenario(AHEAD, checks=[_overlaps]),
    ),
    Case(
        id="C22",
        source="https://github.com/NVIDIA/Megatron-LM",
        title="A gather into the released storage changes the version of what autograd has saved.",
        rules=("I21",),
        unit="decoder.layers.1.mlp.experts",
        node="mlp backward of layer 2",
        microbatch=0,
        shown=Shown.SCENARIO,
        defect="weights are restored by a copy that counts as a change",
        twin="the same copy with the version counter preserved",
        faulty=lambda: run_scenario(SMALL, defect=lambda: _restored_by_copy(is_counted=True)),
        correct=lambda: run_scenario(SMALL, defect=lambda: _restored_by_copy(is_counted=False)),
    ),
)
"""In the order of their ids."""
