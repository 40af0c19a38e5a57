"""Takes one duty of the hooks away at a time, and says what noticed.

A mutant that nothing notices is a hole in the bench, unless it is equivalent: then the reason is
written down beside it. Each mutant names the scenarios in which its duty matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from real.config import Scenario
from sim.swap import owner_of, swapped

_SMALL: Final = {"num_layers": 2, "num_microbatches": 3, "train_iters": 2}
_TE: Final = {**_SMALL, "transformer_impl": "transformer_engine"}

SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "local": _SMALL,
    "te": _TE,
    "delayed": {**_TE, "delay_wgrad_compute": True},
    "odd": {**_TE, "num_layers": 3, "delay_wgrad_compute": True},
    "tied": {**_SMALL, "untie_embeddings_and_output_weights": False},
    "mtp": {**_TE, "mtp_num_layers": 1},
    "frozen": {**_SMALL, "num_layers": 3, "freeze": "decoder.layers.1.*"},
    "hybrid": {**_TE, "world_size": 8, "num_distributed_optimizer_instances": 2},
    "hfsdp": {
        **_TE,
        "world_size": 8,
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
    },
    "recompute": {
        **_TE,
        "recompute_granularity": "full",
        "overlap_moe_expert_parallel_comm": False,
        "fine_grained_hooks": True,
        "prefetch": "forward",
    },
    "plain": {
        **_TE,
        "overlap_moe_expert_parallel_comm": False,
        "fine_grained_hooks": True,
    },
    # Adam does not feel the size of a gradient; plain descent does.
    "clip": {**_TE, "clip_grad": 0.05, "optimizer": "sgd", "lr": 1.0},
}
"""Scenario keys by name; small ones, each for duties that the others do not need."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One duty taken away.

    Attributes:
        name: What is gone.
        target: Dotted name of the function or attribute that is replaced.
        replacement: Makes what stands there instead, given what stood there.
        scenarios: Names of `SCENARIOS`, tried in order until one notices.
        equivalent: Why nothing can notice, or None.
        twins: Ids of fault cases whose correct twin is tried next, for duties that a scenario is
            recorded too late to show.
    """

    name: str
    target: str
    replacement: Callable[[Any], Any]
    scenarios: tuple[str, ...] = ("local",)
    equivalent: str | None = None
    twins: tuple[str, ...] = ()


def _nothing(_: Any) -> Any:
    return lambda *args, **kwargs: None


def _no_context(_: Any) -> Any:
    @contextmanager
    def stand_in(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return stand_in


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **kwargs: value


def _reduce_first(original: Any) -> Any:
    """Packs and reduces the gradients before the full weights are released."""

    def finish(scheduler: Any, unit: Any, cause: str) -> None:
        close = scheduler._close_backward
        scheduler._close_backward = lambda *args: None
        try:
            original(scheduler, unit, cause)
        finally:
            del scheduler._close_backward
        close(unit, cause)

    return finish


def _release_at_once(original: Any) -> Any:
    """Releases after the forward although the backward still needs the weights."""

    def release(scheduler: Any, names: Any, cause: str) -> None:
        for name in names:
            scheduler._reshard(scheduler.units[name])
        original(scheduler, names, cause)

    return release


def _every_gather(original: Any) -> Any:
    """Gathers whether or not the unit is unsharded."""

    def gather(scheduler: Any, unit: Any) -> None:
        module = unit.unit.module
        event, module._unshard_event = module._unshard_event, None
        original(scheduler, unit)
        del event

    return gather


def _without(field: str, value: Any) -> Callable[[Any], Any]:
    """Changes one field of what `find_consumers` returns."""
    import dataclasses

    def make(original: Any) -> Any:
        def find(*args: Any, **kwargs: Any) -> Any:
            return dataclasses.replace(original(*args, **kwargs), **{field: value})

        return find

    return make


def _plain_optimizer(_: Any) -> Any:
    def shard(optimizer: Any) -> None:
        from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
            fully_shard_optimizer,
        )

        fully_shard_optimizer(optimizer)

    return shard


_ORDERING = "real.hooks.scheduler.ordering"
_SCHEDULER = "real.hooks.scheduler.UnitScheduler"
_ADAPTER = "real.mcore.schedule.Mfsdp1F1B"

MUTANTS: Final = (
    Mutant(
        name="compute waits for the gather",
        target=f"{_ORDERING}.join_unshard",
        replacement=_nothing,
    ),
    Mutant(
        name="gather waits for the optimizer",
        target=f"{_ORDERING}.fork_all_gather",
        replacement=_nothing,
    ),
    Mutant(
        name="gradient reader waits for reductions",
        target=f"{_ORDERING}.join_reduce_scatter",
        replacement=_nothing,
    ),
    Mutant(
        name="reduce-scatter stream forks before backward",
        target=f"{_ORDERING}.fork_reduce_scatter",
        replacement=_nothing,
        scenarios=("local", "delayed", "hybrid"),
        equivalent="Only a graph capture needs it, and capture is refused; each reduction joins.",
    ),
    Mutant(name="forward hook", target=f"{_SCHEDULER}.pre_forward", replacement=_nothing),
    Mutant(name="backward hook", target=f"{_SCHEDULER}.pre_backward", replacement=_nothing),
    Mutant(name="gradient hook", target=f"{_SCHEDULER}.post_gradient", replacement=_nothing),
    Mutant(
        name="release after a whole module's forward",
        target=f"{_SCHEDULER}.post_forward",
        replacement=_nothing,
        scenarios=("plain",),
    ),
    Mutant(
        name="forward release of a layer",
        target=f"{_ADAPTER}.post_forward_release_module",
        replacement=_nothing,
        scenarios=("local", "te", "odd"),
    ),
    Mutant(
        name="backward release of a layer",
        target=f"{_ADAPTER}.post_backward_release_module",
        replacement=_nothing,
        scenarios=("frozen",),
    ),
    Mutant(
        name="backward release at the end of a combined step",
        target=f"{_ADAPTER}.post_backward",
        replacement=_nothing,
        scenarios=("frozen", "mtp", "tied"),
        equivalent="The root is complete by then; finish_grad_sync closes a frozen one.",
    ),
    Mutant(
        name="forward release keeps a unit that backward uses",
        target=f"{_SCHEDULER}.release_forward",
        replacement=_release_at_once,
        scenarios=("odd", "recompute"),
    ),
    Mutant(name="final wait", target=f"{_ADAPTER}.finish_grad_sync", replacement=_nothing),
    Mutant(
        name="no_sync",
        target=f"{_ADAPTER}.no_sync",
        replacement=_no_context,
        scenarios=("hybrid", "hfsdp"),
    ),
    Mutant(name="gather once", target=f"{_SCHEDULER}._gather", replacement=_every_gather),
    Mutant(
        name="release before the gradient buffer",
        target=f"{_SCHEDULER}._finish_backward",
        replacement=_reduce_first,
        scenarios=("local", "te"),
    ),
    Mutant(
        name="recomputed forward is told apart",
        target="real.hooks.scheduler._is_inside_backward",
        replacement=_constant(False),
        scenarios=("recompute",),
    ),
    Mutant(
        name="borrowed weight is gathered",
        target="real.mcore.schedule.find_consumers",
        replacement=_without("borrowers", {}),
        scenarios=("tied",),
    ),
    Mutant(
        name="shared weight is counted per node",
        target="real.mcore.schedule.find_consumers",
        replacement=_without("fires", {}),
        scenarios=("tied", "mtp"),
    ),
    Mutant(
        name="delayed gradients are told apart",
        target="real.mcore.schedule._is_delayed",
        replacement=_constant(False),
        scenarios=("delayed",),
    ),
    Mutant(name="expert gradient divisor", target="torch._foreach_div_", replacement=_nothing),
    Mutant(
        name="MFSDP's own hooks come off",
        target="real.mcore.schedule.internals.detach_execution_hooks",
        replacement=_constant(lambda: None),
    ),
    Mutant(
        name="model weights follow in one order",
        target="real.mcore.jobs.internals.shard_optimizer",
        replacement=_plain_optimizer,
        scenarios=("hfsdp",),
    ),
    Mutant(
        name="norm sums over the experts of other ranks",
        target="real.mcore.jobs.parallel_state.get_expert_model_parallel_group",
        replacement=_nothing,
        scenarios=("clip",),
    ),
    Mutant(
        name="clipping",
        target="real.mcore.clip.clip_gradients",
        replacement=_nothing,
        scenarios=("clip",),
    ),
    Mutant(
        name="first accumulators are kept for the reduce-scatter stream",
        target="real.mcore.schedule.internals.keep_accumulators",
        replacement=_nothing,
        scenarios=(),
        twins=("D1",),
    ),
    Mutant(
        name="every unit has its context before the schedule",
        target=f"{_ADAPTER}._replace_param_with_raw_if_needed",
        replacement=_nothing,
        equivalent="The adapter makes the context when it is built; the call repeats it.",
    ),
    Mutant(
        name="layouts are remembered",
        target="real.mcore.schedule.internals.memoize_layouts",
        replacement=_constant(lambda: None),
        equivalent="It saves host time and changes no value.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        name: The mutant.
        killed_by: What noticed, or None.
        scenario: In which scenario or twin.
        equivalent: Why nothing could, or None.
    """

    name: str
    killed_by: str | None
    scenario: str | None
    equivalent: str | None


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Puts a mutant in place for the length of the block."""
    with swapped(*owner_of(mutant.target), mutant.replacement):
        yield


def run_mutants(
    mutants: Sequence[Mutant] = MUTANTS, *, progress: Callable[[str], None] = lambda _: None
) -> list[Verdict]:
    """Runs every mutant until a scenario notices it."""
    from sim.session.megatron import megatron_on_fake_cuda

    verdicts = []
    with ExitStack() as stack:
        stack.enter_context(megatron_on_fake_cuda())  # the targets must be importable
        references: dict[str, Any] = {}
        for number, mutant in enumerate(mutants, start=1):
            progress(f"mutant {number} of {len(mutants)}: {mutant.name}")
            verdicts.append(_judge(mutant, references))
    return verdicts


def _judge(mutant: Mutant, references: dict[str, Any]) -> Verdict:
    for name in mutant.scenarios:
        notice = _notice(mutant, name, references)
        if notice is not None:
            return Verdict(name=mutant.name, killed_by=notice, scenario=name, equivalent=None)
    for case in mutant.twins:
        notice = _notice_in_twin(mutant, case)
        if notice is not None:
            place = f"twin of {case}"
            return Verdict(name=mutant.name, killed_by=notice, scenario=place, equivalent=None)
    return Verdict(name=mutant.name, killed_by=None, scenario=None, equivalent=mutant.equivalent)


def _notice(mutant: Mutant, scenario: str, references: dict[str, Any]) -> str | None:
    """Returns the first line of what noticed the mutant, or None."""
    from sim.session.options import RunOptions
    from sim.session.run import run_in_process, run_reference
    from sim.world import WorldError

    keys = Scenario(**SCENARIOS[scenario])
    if scenario not in references:
        references[scenario] = run_reference(keys)
    try:
        with applied(mutant):
            options = RunOptions(kernel_steps=None)
            result = run_in_process(keys, options, references=references[scenario])
    except WorldError as error:
        return error.problem.splitlines()[0]
    problems = result.problems()
    return problems[0].splitlines()[0] if problems else None


def _notice_in_twin(mutant: Mutant, case: str) -> str | None:
    """Returns the first line of what the correct twin of a fault case found, or None."""
    from sim.cases import all_cases

    [twin] = [known.correct for known in all_cases() if known.id == case]
    if twin is None:
        raise ValueError(f"Expected a case that a CPU can show, got {case}.")
    with applied(mutant):
        found = twin()
    return str(found[0]).splitlines()[0] if found else None
