"""Cases of group H: graph capture, life cycle, state."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Final

import torch
from torch import nn

from sim.cases import bodies_streams as streams
from sim.cases import bodies_units as units
from sim.cases.base import Case, Shown
from sim.cases.judges import check_budget, check_equal
from sim.cases.worlds import Defect, Rank, replaced, run_ranks
from sim.checks import Violation
from sim.checks.base import unit_label

_PULL: Final = "https://github.com/NVIDIA/Megatron-LM/pull"

# -- H1 ----


def _captured_window(rank: Rank) -> None:
    """Captures a window whose all-gather stream is joined by the caller at the end."""
    kernel = units.start(rank)
    context = kernel.model.scheduler.context
    units.begin(0)
    with streams.captured():
        kernel.window(2)
        kernel.model.finish_grad_sync()
        torch.cuda.current_stream().wait_stream(context.all_gather_stream)
    units.end(0)


def _reductions_not_forked() -> AbstractContextManager[None]:
    return replaced("real.hooks.ordering.fork_reduce_scatter", lambda _: lambda context: None)


# -- H6 ---------------------------------------------------------------------------------------


def _dropped_model(rank: Rank) -> list[Violation]:
    """Trains a step, drops the model with its hooks on and looks what is left without gc."""
    kernel = units.start(rank)
    kernel.step(0)
    left = {
        name: weakref.ref(unit.unit.module) for name, unit in kernel.model.scheduler.units.items()
    }
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del kernel
        return [
            Violation(
                rule="I16",
                rank=rank.number,
                message="The unit outlives its model until the garbage collector runs.",
                unit=unit_label(name),
            )
            for name, unit in left.items()
            if unit() is not None
        ]
    finally:
        if was_enabled:
            gc.enable()


def _strong_references() -> AbstractContextManager[None]:
    return replaced("real.mcore.schedule.internals.loosen", lambda _: lambda root: lambda: None)


def _found_in_bodies(
    body: Callable[[Rank], list[Violation]], defect: Defect = nullcontext
) -> list[Violation]:
    with defect():
        outcome = run_ranks(2, body)
    return outcome.violations() + [v for found in outcome.results for v in found]


# -- H8 ----


def _wrapped_twice(rank: Rank) -> None:
    """A chunk is wrapped anew, as after loading a checkpoint."""
    kernel = units.start(rank)
    units.wrap(kernel.model.module)
    kernel.step(0)


@contextmanager
def _installation_forgotten() -> Iterator[None]:
    """Nobody remembers that a model has hooks."""
    with (
        replaced("real.hooks.install.installed_handle", lambda _: lambda root: None),
        replaced("real.mcore.schedule.installed_handle", lambda _: lambda root: None),
    ):
        yield


# -- H9 ---------------------------------------------------------------------------------------


def _built_on_meta(*, initializes: bool) -> list[Violation]:
    """Builds a chunk without memory, gives it memory, and maybe values.

    Args:
        initializes: Whether values are set after the memory came.
    """

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            chunk = units.Chunk()
        chunk.to_empty(device="cpu")
        for parameter in chunk.parameters():
            with torch.no_grad():  # what a rank finds in memory is its own
                parameter.fill_(float(rank.number + 1))
        if initializes:
            torch.manual_seed(1)
            for parameter in chunk.parameters():
                nn.init.normal_(parameter)
        weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        units.start(rank, chunk).step(0)
        return weights

    outcome = run_ranks(2, body)
    return outcome.violations() + check_equal(outcome.results)


# -- H12 --------------------------------------------------------------------------------------

_HOOKS: Final = frozenset(
    f"UnitScheduler.{name}" for name in ("pre_forward", "pre_backward", "post_gradient")
)
_MOST_CALLS: Final = 210
_COUNTED: Final = ("/real/hooks/", "/real/mcore/", "/megatron/")


class _CallCounter:
    """Counts the calls that Megatron and our code make inside each hook, given to sys.setprofile.

    Attributes:
        calls: The largest count by hook and unit.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._hook: FrameType | None = None
        self._count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            if self._hook is None and frame.f_code.co_qualname in _HOOKS:
                self._hook, self._count = frame, 0
            # Of a built-in function the frame is its caller's.
            if self._hook is not None and any(p in frame.f_code.co_filename for p in _COUNTED):
                self._count += 1
        elif event == "return" and frame is self._hook:
            point = frame.f_code.co_name
            subject = frame.f_locals.get("module", frame.f_locals.get("parameter"))
            key = (f"{point} of {subject}", str(frame.f_locals["name"]))
            self.calls[key] = max(self.calls[key], self._count)
            self._hook = None


def _counted_step(rank: Rank) -> list[Violation]:
    """Counts the second step: the first one fills caches."""
    kernel = units.start(rank)
    kernel.step(0)
    counter = _CallCounter()
    sys.setprofile(counter)
    try:
        kernel.step(1)
    finally:
        sys.setprofile(None)
    return check_budget(rank.number, counter.calls, _MOST_CALLS)


@contextmanager
def _layouts_anew() -> Iterator[None]:
    """MFSDP lays out every gradient buffer anew, as released."""
    from real.mcore.internals import layouts

    target = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout"
    with (
        replaced(f"{target}.GlobalLayout.build", lambda _: layouts._released_build),
        replaced("real.mcore.schedule.internals.memoize_layouts", lambda _: lambda: lambda: None),
    ):
        yield


def _on_ranks(body: Callable[[Rank], None], defect: Defect = nullcontext) -> list[Violation]:
    with defect():
        return run_ranks(2, body).violations()


CASES: Final[tuple[Case, ...]] = (
    Case(
        id="H1",
        source=f"{_PULL}/5719",
        title="The reduce-scatter stream is not part of the capture.",
        rules=("I19",),
        unit=None,
        shown=Shown.KERNEL,
        defect="it is not forked at the start of a backward",
        twin="it is",
        faulty=lambda: _on_ranks(_captured_window, _reductions_not_forked),
        correct=lambda: _on_ranks(_captured_window),
    ),
    Case(
        id="H3",
        source=f"{_PULL}/4663",
        title="A gradient is set to None inside a captured iteration.",
        rules=("I19",),
        unit=streams.LAYER,
        shown=Shown.KERNEL,
        defect="the gradient is made anew in each iteration",
        twin="it is set to zero where it is",
        faulty=lambda: _on_ranks(lambda rank: streams.bound_gradient(rank, keeps=False)),
        correct=lambda: _on_ranks(lambda rank: streams.bound_gradient(rank, keeps=True)),
    ),
    Case(
        id="H4",
        source=f"{_PULL}/6152",
        title="A captured dense model crashes at its sixth replay.",
        rules=("I19",),
        unit=None,
        not_on_cpu="the crash is in the replay of a CUDA graph, which only a GPU does",
    ),
    Case(
        id="H6",
        source=f"{_PULL}/6230",
        title="A deleted model keeps its storage: hooks and back references hold it.",
        rules=("I16",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="MFSDP's back references stay strong",
        twin="they are weak while our hooks are on",
        faulty=lambda: _found_in_bodies(_dropped_model, _strong_references),
        correct=lambda: _found_in_bodies(_dropped_model),
    ),
    Case(
        id="H8",
        source=f"{_PULL}/7112",
        title="A second installation doubles every hook.",
        rules=("I16",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="a second wrapper installs again",
        twin="it finds the hooks that are there",
        faulty=lambda: _on_ranks(_wrapped_twice, _installation_forgotten),
        correct=lambda: _on_ranks(_wrapped_twice),
    ),
    Case(
        id="H9",
        source=f"{_PULL}/6484",
        title="A model built on the meta device trains on what was in memory.",
        rules=("init",),
        unit="decoder.layers.0.attn",
        shown=Shown.KERNEL,
        defect="memory is given and no value set",
        twin="every rank sets the same values",
        faulty=lambda: _built_on_meta(initializes=False),
        correct=lambda: _built_on_meta(initializes=True),
    ),
    Case(
        id="H10",
        source=f"{_PULL}/4810",
        title="The fallback of a pool allocator frees without a resize.",
        rules=("I10",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="a unit that does not fit the pool is dropped while it is read",
        twin="its storage is resized on its own stream after the readers",
        faulty=lambda: _on_ranks(
            lambda rank: streams.full_weight_outside_the_pool(rank, resizes=False)
        ),
        correct=lambda: _on_ranks(
            lambda rank: streams.full_weight_outside_the_pool(rank, resizes=True)
        ),
    ),
    Case(
        id="H12",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7264",
        title="The host is the bottleneck: hooks cost too much Python.",
        rules=("budget",),
        unit="decoder.layers.0",
        shown=Shown.KERNEL,
        defect="every gradient buffer is laid out anew",
        twin="layouts are remembered",
        faulty=lambda: _found_in_bodies(_counted_step, _layouts_anew),
        correct=lambda: _found_in_bodies(_counted_step),
    ),
)
