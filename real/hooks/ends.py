"""Tells the scheduler that a unit has run backward, where one autograd pass runs a whole model.

[Note: newest first]
Autograd runs the newest of the nodes that are ready, and stores a gradient as soon as it has it. So
when it comes to a node older than a module's call, such as the one that made the module's input,
every node of that call has run. The combined schedule cuts the graph at the inputs of its own
nodes and says itself when one of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from real.hooks.scheduler import UnitScheduler
from real.hooks.weak import WeakHook, tensors_in


class _End:
    """Says once that the backward of one call of a unit's module has ended."""

    def __init__(self, hook: WeakHook) -> None:
        self._hook = hook
        self._is_said = False

    def say(self, _: object = None) -> None:
        scheduler = self._hook.scheduler()
        if scheduler is not None and not self._is_said:
            self._is_said = True
            name = self._hook.unit
            scheduler.end_backward([name], f"the end of its backward in {name or '<root>'}")

    def queue(self, _: object) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.say)


class _ArmEnd(WeakHook):
    """Before a unit's module is called, hooks the nodes that made its inputs.

    A recomputed module's input is cut off from its maker: the first, outer call has armed that one.
    """

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        end = _End(self)
        for tensor in tensors_in([args, kwargs]):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(end.say)


class _ArmLast(WeakHook):
    """After the root's call: its backward ends with the whole autograd pass."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        end = _End(self)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(end.queue)


def install_ends(scheduler: UnitScheduler, modules: Mapping[str, nn.Module]) -> Callable[[], None]:
    """Makes each unit's module say when its backward has ended, and returns what undoes it.

    Args:
        scheduler: Is told, in `end_backward`.
        modules: The units' modules by name; each is called as a whole.
    """
    handles = []
    for name, module in modules.items():
        if name:
            arm = _ArmEnd(scheduler, name, name)
            handles.append(module.register_forward_pre_hook(arm, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(_ArmLast(scheduler, name, name)))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
