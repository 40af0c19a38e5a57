"""The adapter that Megatron's schedule talks to: a model under MFSDP v2 and our hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.utils.hooks import RemovableHandle

from real.hooks import (
    HookHandle,
    Prefetch,
    UnitScheduler,
    build_plan,
    build_scheduler,
    install_hooks,
    ordering,
)
from real.hooks.ends import install_ends
from real.hooks.install import installed_handle
from real.mcore import internals
from real.mcore.consumers import find_consumers
from real.mcore.shard import Meshes, shard_model
from real.mcore.validate import validate

# The value that makes the released schedule wire the release callbacks of each layer.
_SHARDING_STRATEGY: Final = "optim_grads_params"


def wrap_model(
    config: Any,
    model: nn.Module,
    meshes: Meshes,
    *,
    expert_parallel_size: int,
    prefetch: Prefetch = Prefetch.NONE,
    is_fine_grained: bool | None = None,
) -> Mfsdp1F1B:
    """Shards a Megatron model with MFSDP v2 and returns what the schedule and the optimizer use.

    Args:
        config: Megatron's transformer config.
        model: The model, on the device, not sharded.
        meshes: The meshes of this rank.
        expert_parallel_size: Number of ranks that the experts are spread over.
        prefetch: Which gathers are issued one unit ahead.
        is_fine_grained: Whether our hooks drive the model; None infers it from
            `config.overlap_moe_expert_parallel_comm`.

    Raises:
        ValueError: The model or its config is beyond what can be done; nothing has been changed.
    """
    validate(config, model)
    divisors = shard_model(model, meshes, expert_parallel_size=expert_parallel_size)
    return Mfsdp1F1B(
        config,
        model,
        grad_divisors=divisors,
        prefetch=prefetch,
        is_fine_grained=is_fine_grained,
    )


def _is_delayed(parameter: nn.Parameter) -> bool:
    """Whether Transformer Engine makes this parameter's gradient in a later call."""
    return bool(getattr(parameter, "skip_backward_post_hook", False))


def _weakly(method: Callable[[], Any]) -> Callable[[], Any]:
    reference = weakref.WeakMethod(method)

    def call() -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("Cannot enter no_sync() of an adapter that is gone.")
        return alive()

    return call


def _forget(module: Callable[[], nn.Module | None]) -> None:
    alive = module()
    if alive is not None:
        internals.drop_schedule_state(alive)


class Mfsdp1F1B(_BaseDataParallel):
    """Wraps a model whose layers, experts and root are MFSDP v2 units.

    Custom scheduling is inferred from `config.overlap_moe_expert_parallel_comm`: with it, MFSDP's
    own execution hooks come off and ours go on; without it MFSDP's own drive the model, unless ours
    are asked for.

    Args:
        config: Megatron's transformer config; `no_sync_func` is set on it.
        module: The model; the root unit.
        grad_divisors: Divisor of a unit's gradients before they are reduced, by unit name.
        prefetch: Which gathers are issued one unit ahead.
        is_fine_grained: Whether our hooks drive the model; None infers it.
    """

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        *,
        grad_divisors: dict[str, int] | None = None,
        prefetch: Prefetch = Prefetch.NONE,
        is_fine_grained: bool | None = None,
    ) -> None:
        super().__init__(config=config, module=module)
        # What the schedule asks a wrapper: the first in training, the other in evaluation, where
        # True would make it call a method that MFSDP v1 alone has.
        self.ddp_config = SimpleNamespace(
            data_parallel_sharding_strategy=_SHARDING_STRATEGY, use_megatron_fsdp=False
        )
        self._context = internals.initialize_context(module)
        internals.keep_accumulators(module)
        self._handle: HookHandle | None = None
        self._undo: list[Callable[[], None]] = []
        self._state_dict_hooks = internals.guard_state_dict(module)
        self._grad_divisors = dict(grad_divisors or {})
        self._prefetch = prefetch
        config.no_sync_func = _weakly(self.no_sync)  # the model keeps its config
        weakref.finalize(self, _forget, weakref.ref(module)).atexit = False
        if config.overlap_moe_expert_parallel_comm or is_fine_grained:
            self.install()
        else:
            self._undo = [internals.divide_gradients(module, self._grad_divisors)]

    # -- installation -----------------------------------------------------------------------

    def install(self) -> HookHandle:
        """Puts our hooks in place of MFSDP's own. A second call changes nothing."""
        if self._handle is not None:
            return self._handle
        existing = installed_handle(self.module)
        if existing is not None:
            self._handle = existing
            return existing
        units = internals.collect_units(self.module)
        consumers = find_consumers(
            self.module, units, is_combined=self.config.overlap_moe_expert_parallel_comm
        )
        plan = build_plan(
            self.module,
            units,
            layers=consumers.layers,
            fires=consumers.fires,
            borrowers=consumers.borrowers,
            is_delayed=_is_delayed,
        )
        parameters = {n: p for unit in units.values() for n, p in unit.trainable_parameters.items()}
        attach = internals.detach_execution_hooks(self.module)
        try:
            self._handle = install_hooks(
                self.module,
                plan,
                lambda plan: build_scheduler(
                    plan,
                    self._context,
                    units,
                    grad_divisors=self._grad_divisors,
                    prefetch=self._prefetch,
                    forward_order=consumers.forward_order,
                ),
                parameters,
            )
        except BaseException:
            attach()
            raise
        self._undo_all()  # of the plain schedule: the scheduler divides gradients itself
        self._undo = [
            attach,
            internals.join_schedule(Mfsdp1F1B),
            internals.tell_backward_nodes(Mfsdp1F1B),
            internals.memoize_layouts(),
            internals.loosen(self.module),
        ]
        if not self.config.overlap_moe_expert_parallel_comm:
            modules = {name: unit.module for name, unit in units.items()}
            self._undo.append(install_ends(self._handle.scheduler, modules))
        return self._handle

    def remove(self) -> None:
        """Takes our hooks off and puts MFSDP's own back. Repeated calls do nothing."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self._undo_all()
        self._undo = [internals.divide_gradients(self.module, self._grad_divisors)]

    def _undo_all(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    @property
    def grad_divisors(self) -> dict[str, int]:
        """Divisor of a unit's gradients before they are reduced, by unit name; 1 for the others."""
        return dict(self._grad_divisors)

    @property
    def expert_units(self) -> frozenset[str]:
        """Names of the units whose parameters differ between expert-parallel ranks."""
        return frozenset(self._grad_divisors)

    @property
    def scheduler(self) -> UnitScheduler:
        """Drives the units while our hooks are installed."""
        if self._handle is None:
            raise RuntimeError("Cannot schedule units before install().")
        return self._handle.scheduler

    def unshard(self, name: str) -> None:
        """Makes a unit's full parameters usable on the current stream; see `UnitScheduler`."""
        self.scheduler.unshard(name)

    def reshard(self, name: str) -> None:
        """Ends a use begun by `unshard`. Repeated calls do nothing."""
        self.scheduler.reshard(name)

    def register_post_backward_hook(
        self, name: str, hook: Callable[[nn.Module], None]
    ) -> RemovableHandle:
        """Calls `hook` with a unit's module each time its reduction has been launched."""
        return self.scheduler.register_post_backward_hook(name, hook)

    # -- called by combined_1f1b ------------------------------------------------------------

    def _replace_param_with_raw_if_needed(self) -> None:
        """Makes sure that every unit has its context before a child could think it is a root."""
        internals.initialize_context(self.module)

    def pre_backward(self) -> None:
        """Before a combined step that has a backward. No autograd callback: nothing runs yet."""
        ordering.fork_reduce_scatter(self._context)

    def post_backward(self) -> None:
        """After a combined step that had a backward: every node of that microbatch has run."""
        self.scheduler.release_backward(list(self.scheduler.units), "post_backward")

    def post_forward_release_module(self, module: nn.Module) -> None:
        """After the last forward node of a layer."""
        names = self._units_in(module)
        self.scheduler.release_forward(names, f"release of {names[0]}")

    def post_backward_release_module(self, module: nn.Module) -> None:
        """After the last backward node of a layer, and after its delayed weight gradients."""
        names = self._units_in(module)
        self.scheduler.release_backward(names, f"release of {names[0]}")

    def post_backward_node(self, node: str, layer: nn.Module) -> None:
        """After each backward of a layer's `mlp` or `pre_dispatch_computation` node.

        The first completes the units inside a layer, the second the layer's own. A layer without
        units inside is first read by its `mlp` node. Not to be called twice for one microbatch.
        """
        own, *inside = self._units_in(layer)
        cause = f"{node} backward of {own}"
        if node == "pre_dispatch_computation":
            self.scheduler.end_backward([own], cause)
        elif inside:
            self.scheduler.end_backward(inside, cause)
        else:
            self.scheduler.end_of_first_use([own], cause)

    def _units_in(self, module: nn.Module) -> Sequence[str]:
        """Names of the unit `module` and of every unit inside it.

        Raises:
            ValueError: `module` is no unit.
        """
        if not internals.is_fsdp_module(module):
            raise ValueError(f"Expected an FSDP unit to release, got {type(module).__name__}.")
        return [str(m.name) for m in module.modules() if internals.is_fsdp_module(m)]

    # -- called by Megatron's training loop -------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Marks every backward inside as not the last one of the window; restores what it found.

        MFSDP v2 reduces after every backward all the same: only the reduction over the outer axis
        of a hybrid mesh waits for the last one.
        """
        previous = self._context.is_last_microbatch
        self._context.is_last_microbatch = False
        try:
            yield
        finally:
            self._context.is_last_microbatch = previous

    def finish_grad_sync(self, *unused: Any, **also_unused: Any) -> None:
        """The current stream waits for every reduction: gradients may be read after this."""
        if self._handle is not None:
            self.scheduler.finish_grad_sync()
        else:
            ordering.join_reduce_scatter(self._context)
