"""Turns a plan into hooks on a live model, and takes them off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from real.hooks.plan import HookPlan
from real.hooks.scheduler import UnitScheduler
from real.hooks.weak import WeakHook, tensors_in
from real.trace import OpKind, active_recorder

_HANDLE_ATTRIBUTE = "_combined_1f1b_hooks"


class _PreForward(WeakHook):
    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        scheduler = self.scheduler()
        if scheduler is not None:
            scheduler.pre_forward(self.unit, self.subject)


class _PostForward(WeakHook):
    def __init__(self, scheduler: UnitScheduler, units: tuple[str, ...], subject: str) -> None:
        super().__init__(scheduler, units[0], subject)
        self.units = units

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        scheduler = self.scheduler()
        if scheduler is not None:
            scheduler.post_forward(self.units, self.subject)


class _PreBackward(WeakHook):
    """Called by autograd before the node that made a module's output.

    Not a module hook: torch keeps the module in the graph for those, and a module that keeps a
    tensor of its own graph would then never be freed; and each call would add identity nodes.
    """

    def __call__(self, grad_outputs: object) -> None:
        scheduler = self.scheduler()
        if scheduler is not None:
            scheduler.pre_backward(self.unit, self.subject)


class _ArmBackward(WeakHook):
    """After a module's forward, puts the backward hook on the nodes that made its outputs."""

    def __init__(self, scheduler: UnitScheduler, unit: str, subject: str) -> None:
        super().__init__(scheduler, unit, subject)
        self._hook = _PreBackward(scheduler, unit, subject)

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if self.scheduler() is None:
            return  # a copy's: the hook that it would arm is the original's
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._hook)


class _PostGradient(WeakHook):
    def __call__(self, parameter: object = None) -> None:
        scheduler = self.scheduler()
        if scheduler is not None:
            scheduler.post_gradient(self.unit, self.subject)


class HookHandle:
    """The hooks installed on one model; `remove` takes all of them off.

    Attributes:
        plan: What was installed.
        scheduler: Drives the units; lives as long as this handle.
    """

    def __init__(self, root: nn.Module, plan: HookPlan, scheduler: UnitScheduler) -> None:
        self.plan = plan
        self.scheduler = scheduler
        self._root = weakref.ref(root)
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def num_hooks(self) -> int:
        """Number of hooks that are on the model now."""
        return len(self._handles) + len(self._undo)

    def remove(self) -> None:
        """Takes every hook off the model. Repeated calls do nothing."""
        root = self._root()
        if self.num_hooks and root is not None:
            recorder = active_recorder()
            recorder.record(OpKind.REMOVE, model=recorder.model_number(root))
        for handle in reversed(self._handles):
            handle.remove()
        for undo in reversed(self._undo):
            undo()
        self._handles, self._undo = [], []
        if root is not None and getattr(root, _HANDLE_ATTRIBUTE, None) is self:
            delattr(root, _HANDLE_ATTRIBUTE)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None  # the copy of a model has no hooks installed


def installed_handle(root: nn.Module) -> HookHandle | None:
    """Returns the handle of the hooks on `root`, or None when there are none."""
    handle = root.__dict__.get(_HANDLE_ATTRIBUTE)
    return handle if isinstance(handle, HookHandle) else None


def install_hooks(
    root: nn.Module,
    plan: HookPlan,
    make_scheduler: Callable[[HookPlan], UnitScheduler],
    parameters: Mapping[str, nn.Parameter],
) -> HookHandle:
    """Installs the hooks of a plan. A second installation on the same model changes nothing.

    Args:
        root: The outermost unit's module.
        plan: A valid plan of this model.
        make_scheduler: Makes the object that drives the units; called once.
        parameters: Full (unsharded) trainable parameters by name, as the plan names them.

    Returns:
        The handle of the hooks that are on the model, new or from before.
    """
    existing = installed_handle(root)
    if existing is not None:
        return existing
    scheduler = make_scheduler(plan)
    handle = HookHandle(root, plan, scheduler)
    try:
        modules = dict(root.named_modules())
        for demand in plan.demand:
            module = modules[demand.module]
            handle._handles.append(
                module.register_forward_pre_hook(
                    _PreForward(scheduler, demand.unit, demand.module),
                    prepend=True,
                    with_kwargs=True,
                )
            )
            handle._handles.append(
                module.register_forward_hook(_ArmBackward(scheduler, demand.unit, demand.module))
            )
        for name, units in plan.releases.items():
            if units:
                handle._handles.append(
                    modules[name].register_forward_hook(_PostForward(scheduler, units, name))
                )
        for gradient in plan.gradients:
            hook = _PostGradient(scheduler, gradient.unit, gradient.parameter)
            if gradient.is_delayed:
                handle._undo.append(_register_delayed(modules[gradient.module], hook))
            else:
                handle._handles.append(
                    parameters[gradient.parameter].register_post_accumulate_grad_hook(hook)
                )
        object.__setattr__(root, _HANDLE_ATTRIBUTE, handle)
        recorder = active_recorder()
        recorder.record(OpKind.INSTALL, model=recorder.model_number(root), hooks=handle.num_hooks)
    except BaseException:
        handle.remove()
        raise
    return handle


def _register_delayed(module: nn.Module, hook: _PostGradient) -> Callable[[], None]:
    """Registers with Transformer Engine, which runs the hook at the end of `backward_dw`."""
    register: Any = module.register_wgrad_accumulation_and_reduce_hooks
    register(hook)
    hooks: list[Any] = module.wgrad_accumulation_and_reduce_hooks  # type: ignore[assignment]

    def remove() -> None:
        hooks.remove(hook)

    return remove
