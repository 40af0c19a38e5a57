"""Runs `python -m real` with one duty of the hooks taken away; for tests, under torchrun.

`torchrun --nproc-per-node 2 tests/conformance/mutated.py MUTANT trace ...`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

    from real.hooks import HookHandle, HookPlan

ROOT: Final = Path(__file__).parents[2]


@contextmanager
def _replaced(owner: object, name: str, stand_in: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _nothing(*args: object) -> None:
    return None


def without_wait_for_gather() -> AbstractContextManager[None]:
    """Nobody waits for the gather of a unit that is about to be read."""
    from real.hooks import ordering

    return _replaced(ordering, "join_unshard", _nothing)


def without_wait_for_reductions() -> AbstractContextManager[None]:
    """Nobody waits for the last reduction before gradients are read."""
    from real.hooks import ordering

    return _replaced(ordering, "join_reduce_scatter", _nothing)


@contextmanager
def module_backward_hooks() -> Iterator[None]:
    """Backward hooks sit on modules, as `register_full_backward_pre_hook` puts them."""
    from real.mcore import schedule

    install = schedule.install_hooks

    def install_on_modules(root: nn.Module, plan: HookPlan, *args: object) -> HookHandle:
        handle = install(root, plan, *args)
        for demand in plan.demand:
            root.get_submodule(demand.module).register_full_backward_pre_hook(
                lambda module, gradients, demand=demand: handle.scheduler.pre_backward(
                    demand.unit, demand.module
                )
            )
        return handle

    with _replaced(schedule, "install_hooks", install_on_modules):
        yield


@contextmanager
def hooks_on_every_submodule() -> Iterator[None]:
    """Submodules without a parameter of their own have hooks too."""
    from real.hooks import plan
    from real.hooks.owner import OwnedModule

    def every_module(
        root: nn.Module, is_unit: Callable[[nn.Module], bool]
    ) -> Iterator[OwnedModule]:
        units = [name for name, module in root.named_modules() if is_unit(module)]
        for name, module in root.named_modules():
            owners = [u for u in units if not u or name == u or name.startswith(f"{u}.")]
            yield OwnedModule(name, module, max(owners, key=len))

    with _replaced(plan, "owned_modules", every_module), module_backward_hooks():
        yield


MUTANTS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    "without-wait-for-gather": without_wait_for_gather,
    "without-wait-for-reductions": without_wait_for_reductions,
    "module-backward-hooks": module_backward_hooks,
    "hooks-on-every-submodule": hooks_on_every_submodule,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # torchrun puts this file's folder there
    from real.cli import main

    with MUTANTS[sys.argv[1]]():
        raise SystemExit(main(sys.argv[2:]))
