"""The faults of group E, and the bodies and scenarios that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from sim.cases import bodies_units as units
from sim.cases.base import Run
from sim.cases.judges import check_last
from sim.cases.judges_memory import check_kept_gradients
from sim.cases.judges_overlap import check_coverage, check_exposed
from sim.cases.numbers import compare_gradients
from sim.cases.worlds import (
    SMALL,
    Defect,
    Outcome,
    Rank,
    replaced,
    run_ranks,
    train,
)
from sim.checks import Violation

_ADAPTER: Final = "real.mcore.schedule.Mfsdp1F1B"
_SCHEDULER: Final = "real.hooks.scheduler.UnitScheduler"
_GROUP: Final = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group"
    ".FsdpParameterGroup"
)
HYBRID: Final = SMALL.changed(
    num_layers=1, world_size=4, num_distributed_optimizer_instances=2, num_microbatches=3
)
THREE: Final = SMALL.changed(num_microbatches=3)
_UNITS: Final = ("", "decoder.layers.0", "decoder.layers.1")
_NUM_MICROBATCHES: Final = 3


def window(
    *,
    num_outer: int = 1,
    defect: Defect = nullcontext,
    drive: Callable[[units.Kernel], None] | None = None,
) -> Outcome:
    """Runs one window of three microbatches on two ranks; results are gradients."""

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        kernel = units.start(rank, num_outer=num_outer)
        units.begin(0)
        if drive is None:
            kernel.window(_NUM_MICROBATCHES)
        else:
            drive(kernel)
        kernel.model.finish_grad_sync()
        gradients = units.gradients(kernel.model)
        units.end(0)
        return gradients

    with defect():
        return run_ranks(2, body)


def judged(outcome: Outcome) -> list[Violation]:
    """Judges traces, flags and gradients of `window`."""
    found = outcome.violations() + check_last(outcome.traces)
    expected = units.expected_gradients(2, _NUM_MICROBATCHES)
    for rank, gradients in enumerate(outcome.results):
        found += compare_gradients(rank, gradients, expected, _UNITS)
    return found


# -- E1, E2, E4 -------------------------------------------------------------------------------


@contextmanager
def every_backward_is_last() -> Iterator[None]:
    """`no_sync` does nothing, and a finished window is cleared for the next one."""

    def no_sync(_: Any) -> Any:
        return lambda adapter: nullcontext()

    def make(original: Any) -> Any:
        def reduce(unit: Any) -> None:
            for group in unit.module._parameter_groups:
                for parameter in group.sharded_parameters:
                    parameter.grad = None
            original(unit)

        return reduce

    with (
        replaced(f"{_ADAPTER}.no_sync", no_sync),
        replaced("real.mcore.internals.units.MfsdpUnit.reduce_gradients", make),
    ):
        yield


def group_of_one_adds_to_itself() -> AbstractContextManager[None]:
    """In a group of one the reduced gradient is the accumulator itself, and is added to it."""

    def make(original: Any) -> Any:
        def reduce(group: Any, partial: Any, is_last_microbatch: bool = True) -> None:
            if group.mesh.size() == 1 and group.sharded_parameters[0].grad is not None:
                group.main_grad.local_buffer.add_(group.main_grad.local_buffer)
            original(group, partial, is_last_microbatch)

        return reduce

    return replaced(f"{_GROUP}.reduce_partial_gradients", make)


def no_reduction_in_no_sync() -> AbstractContextManager[None]:
    """`no_sync` leaves reductions out, as plain data parallelism does: full gradients pile up."""

    def make(original: Any) -> Any:
        def finish(scheduler: Any, unit: Any, cause: str) -> None:
            if scheduler.context.is_last_microbatch:
                original(scheduler, unit, cause)
            else:
                scheduler._close_backward(unit, cause)

        return finish

    return replaced(f"{_SCHEDULER}._finish_backward", make)


# -- E6, E7 -----------------------------------------------------------------------------------


def no_sync_around_backward(kernel: units.Kernel) -> None:
    """Forwards run outside `no_sync`, backwards of all but the last microbatch inside."""
    kernel.forward(0)
    for microbatch in range(_NUM_MICROBATCHES):
        is_last = microbatch == _NUM_MICROBATCHES - 1
        if not is_last:
            kernel.forward(microbatch + 1)
        with nullcontext() if is_last else kernel.model.no_sync():
            kernel.backward(microbatch)


@contextmanager
def decided_in_forward() -> Iterator[None]:
    """The flag is read in forward and used in the backward of the same microbatch."""
    decided: dict[Any, list[bool]] = {}

    def make_forward(original: Any) -> Any:
        def pre_forward(scheduler: Any, name: str, module: str) -> None:
            original(scheduler, name, module)
            flags = decided.setdefault(scheduler.units[name], [])
            if module.endswith((".attn", "embedding")):
                flags.append(scheduler.context.is_last_microbatch)

        return pre_forward

    def make_finish(original: Any) -> Any:
        def finish(scheduler: Any, unit: Any, cause: str) -> None:
            previous = scheduler.context.is_last_microbatch
            scheduler.context.is_last_microbatch = decided[unit].pop(0)
            try:
                original(scheduler, unit, cause)
            finally:
                scheduler.context.is_last_microbatch = previous

        return finish

    with (
        replaced(f"{_SCHEDULER}.pre_forward", make_forward),
        replaced(f"{_SCHEDULER}._finish_backward", make_finish),
    ):
        yield


@contextmanager
def calls_are_counted() -> Iterator[None]:
    """The last backward is call number N - 1, while each microbatch makes two calls."""
    calls: dict[Any, int] = {}

    def make_before(original: Any) -> Any:
        def pre_backward(adapter: Any) -> None:
            original(adapter)
            number = calls.setdefault(adapter, 0)
            adapter._context.is_last_microbatch = number == _NUM_MICROBATCHES - 1
            calls[adapter] += 2  # input gradients, then weight gradients

        return pre_backward

    def no_sync(_: Any) -> Any:
        return lambda adapter: nullcontext()

    with (
        replaced(f"{_ADAPTER}.no_sync", no_sync),
        replaced(f"{_ADAPTER}.pre_backward", make_before),
    ):
        yield


# -- E9 ---------------------------------------------------------------------------------------


def outer_accumulation(*, tells: bool) -> Callable[[Rank], None]:
    """A runtime keeps its stage gathered over two schedules; FSDP's finaliser releases it.

    Args:
        tells: Whether the finaliser tells the runtime.
    """

    def body(rank: Rank) -> None:
        kernel = units.start(rank)
        unit = kernel.model.scheduler.units["decoder.layers.0"].unit
        value = units.given_to(rank.number, 0)
        is_unsharded = False
        kernel.model.scheduler.context.all_gather_stream.wait_stream(torch.cuda.current_stream())
        for _ in range(2):
            if not is_unsharded:
                unit.unshard()
                event = unit.unshard_event
                assert event is not None
                event.wait()
                is_unsharded = True
            for weight in unit.trainable_parameters.values():
                torch.nn.functional.linear(value, weight.detach())
            unit.reshard()
            if tells:
                is_unsharded = False

    return body


# -- E11 --------------------------------------------------------------------------------------


def step_waits_for_each_reduction() -> AbstractContextManager[None]:
    """The compute stream waits for each reduction as soon as it is launched."""

    def make(original: Any) -> Any:
        def reduce(unit: Any) -> None:
            original(unit)
            torch.cuda.current_stream().wait_stream(unit.module.context.reduce_scatter_stream)

        return reduce

    return replaced("real.mcore.internals.units.MfsdpUnit.reduce_gradients", make)


def exposed(defect: Defect = nullcontext) -> list[Violation]:
    """Runs a window and looks for reductions that nothing hides."""
    outcome = window(defect=defect)
    return outcome.violations() + check_exposed(outcome.traces)


# -- E12 --------------------------------------------------------------------------------------


@contextmanager
def gradients_named() -> Iterator[None]:
    """The full gradients of a unit get a name in the trace when the unit is complete."""

    def make(original: Any) -> Any:
        def finish(scheduler: Any, unit: Any, cause: str) -> None:
            for parameter in unit.unit.trainable_parameters.values():
                units.name_storage(parameter.grad, unit.name, "full gradient")
            original(scheduler, unit, cause)

        return finish

    with replaced(f"{_SCHEDULER}._finish_backward", make):
        yield


@contextmanager
def gradients_named_and_kept() -> Iterator[None]:
    """`no_sync` leaves reductions out, and full gradients are named."""
    with no_reduction_in_no_sync(), gradients_named():
        yield


def kept(defect: Defect) -> list[Violation]:
    """Runs a window and looks for full gradients that stay."""
    outcome = window(defect=defect)
    return outcome.violations() + check_kept_gradients(outcome.traces)


# -- E15, E16 ---------------------------------------------------------------------------------


def two_chunks(*, share_flag: bool) -> Run:
    """Two chunks of a virtual pipeline, the second of which runs its last backward first."""

    def body(rank: Rank) -> None:
        torch.manual_seed(1)
        chunks = [
            units.Chunk(1, first_layer=first, has_embedding=False, has_output=False)
            for first in (0, 1)
        ]
        kernels = units.start_all(rank, chunks, num_outer=2)
        early, late = kernels
        units.begin(0)
        for microbatch in range(2):
            for kernel in kernels:
                kernel.forward(microbatch)
        with early.model.no_sync(), late.model.no_sync():
            late.backward(0)
            early.backward(0)
        with early.model.no_sync() if share_flag else nullcontext():
            with late.model.no_sync() if share_flag else nullcontext():
                late.backward(1)
        early.backward(1)
        for kernel in kernels:
            kernel.model.finish_grad_sync()
        units.end(0)

    def run() -> list[Violation]:
        outcome = run_ranks(2, body)
        return outcome.violations() + check_last(outcome.traces)

    return run


def covered(num_microbatches: int) -> list[Violation]:
    """Trains so many microbatches and looks for a forward against a backward."""
    outcome = train(SMALL.changed(num_microbatches=num_microbatches))
    return outcome.violations() + check_coverage(outcome.traces)
