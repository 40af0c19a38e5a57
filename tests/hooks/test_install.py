"""What installation leaves on a model, and that removal takes exactly that off again."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from pytest_mock import MockerFixture
from torch import nn

from real.hooks import HookHandle, HookPlan, install_hooks
from real.hooks.install import installed_handle
from real.hooks.plan import DemandUnshard, GradientCount

HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class DelayedLinear(nn.Linear):
    """A linear layer with Transformer Engine's way of registering for a delayed gradient."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class TwoLinear(nn.Module):
    """An ordinary linear layer and one with a delayed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = DelayedLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


PLAN = HookPlan(
    demand=(DemandUnshard(module="first", unit=""), DemandUnshard(module="second", unit="u")),
    gradients=(
        GradientCount(parameter="first.weight", unit="", module="first", fires=1, is_delayed=False),
        GradientCount(
            parameter="second.weight", unit="u", module="second", fires=1, is_delayed=True
        ),
    ),
    releases={"second": ("u",), "": ("",)},
)
NUM_HOOKS = 2 * 2 + 2 + 2  # before forward and backward, after forward, after each gradient


class NotingScheduler:
    """Writes down the hook points that reach it."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def pre_forward(self, unit: str, module: str) -> None:
        self.points.append(f"before forward of {module} in {unit!r}")

    def post_forward(self, units: tuple[str, ...], module: str) -> None:
        self.points.append(f"after forward of {module!r}")

    def pre_backward(self, unit: str, module: str) -> None:
        self.points.append(f"before backward of {module} in {unit!r}")

    def post_gradient(self, unit: str, parameter: str) -> None:
        self.points.append(f"gradient of {parameter} in {unit!r}")


def install(model: nn.Module, plan: HookPlan = PLAN) -> HookHandle:
    return install_hooks(
        model,
        plan,
        lambda _: NotingScheduler(),  # type: ignore[arg-type,return-value]
        dict(model.named_parameters()),
    )


def hooks_on(model: nn.Module) -> dict[str, list[Any]]:
    """Returns every hook on a model, in order, by where it is."""
    found: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        for dictionary in HOOK_DICTIONARIES:
            found[f"{name}.{dictionary}"] = list(getattr(module, dictionary).items())
        found[f"{name}.wgrad"] = list(getattr(module, "wgrad_accumulation_and_reduce_hooks", []))
    for name, parameter in model.named_parameters():
        found[name] = list((parameter._post_accumulate_grad_hooks or {}).items())
    return {place: hooks for place, hooks in found.items() if hooks}


def points_of_a_step(model: nn.Module, handle: HookHandle) -> list[str]:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    model.second.backward_dw()
    points: list[str] = handle.scheduler.points  # type: ignore[attr-defined]
    taken = list(points)
    points.clear()
    return taken


POINTS = [
    "before forward of first in ''",
    "before forward of second in 'u'",
    "after forward of 'second'",
    "after forward of ''",
    "before backward of second in 'u'",
    "before backward of first in ''",
    "gradient of first.weight in ''",
    "gradient of second.weight in 'u'",
]


def test_every_hook_point_of_the_plan_reaches_the_scheduler() -> None:
    """And nothing else does."""
    model = TwoLinear()
    handle = install(model)
    assert points_of_a_step(model, handle) == POINTS
    assert handle.num_hooks == NUM_HOOKS


def test_our_hook_runs_before_the_hooks_of_others() -> None:
    """A hook of the user's may read the weights."""
    model = TwoLinear()
    seen: list[int] = []
    model.first.register_forward_pre_hook(
        lambda *_: seen.append(len(handle.scheduler.points))  # type: ignore[attr-defined]
    )
    handle = install(model)
    model(torch.ones(1, 2))
    assert seen == [1]


def test_installing_twice_changes_nothing() -> None:
    """Two sets would count every gradient twice."""
    model = TwoLinear()
    handle = install(model)
    hooks = hooks_on(model)
    assert install(model) is handle
    assert hooks_on(model) == hooks
    assert handle.num_hooks == sum(len(there) for there in hooks.values()) == NUM_HOOKS


def test_remove_restores_the_hooks_that_were_there() -> None:
    """Same hooks, same keys, same order."""
    model = TwoLinear()
    model.first.register_forward_pre_hook(lambda *_: None)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    model.second.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    before = hooks_on(model)
    handle = install(model)
    handle.remove()
    assert hooks_on(model) == before
    assert handle.num_hooks == 0
    assert installed_handle(model) is None


def test_remove_twice_takes_nothing_of_the_next_installation_off() -> None:
    """A stale handle is easy to keep."""
    model = TwoLinear()
    stale = install(model)
    stale.remove()
    handle = install(model)
    hooks = hooks_on(model)
    stale.remove()
    assert hooks_on(model) == hooks
    assert installed_handle(model) is handle


def test_hooks_work_again_after_remove_and_install() -> None:
    """Removal leaves nothing behind that is in the way."""
    model = TwoLinear()
    install(model).remove()
    handle = install(model)
    assert points_of_a_step(model, handle) == POINTS


def test_the_copied_hooks_of_a_copied_model_do_nothing() -> None:
    """They would drive the units of the original."""
    model = TwoLinear()
    handle = install(model)
    copied = copy.deepcopy(model)
    assert installed_handle(copied) is None
    assert points_of_a_step(copied, handle) == []


def test_a_copied_model_can_have_hooks_of_its_own() -> None:
    """The copy is a model like any other."""
    model = TwoLinear()
    handle = install(model)
    copied = copy.deepcopy(model)
    own = install(copied)
    assert own is not handle
    assert points_of_a_step(copied, own) == POINTS
    assert points_of_a_step(model, handle) == POINTS


class Refusal(Exception):
    """Raised by a registration that fails."""


@pytest.mark.parametrize(
    ("target", "num_good"),
    [
        ("torch.nn.Module.register_forward_pre_hook", 0),
        ("torch.nn.Module.register_forward_pre_hook", 1),
        ("torch.nn.Module.register_forward_hook", 0),
        ("torch.nn.Module.register_forward_hook", 2),
        ("torch.Tensor.register_post_accumulate_grad_hook", 0),
    ],
    ids=["first", "forward", "backward", "release", "gradient"],
)
def test_a_failure_half_way_leaves_the_model_as_it_was(
    mocker: MockerFixture, target: str, num_good: int
) -> None:
    """Half of the hooks would gather units that nobody releases."""
    model = TwoLinear()
    model.first.register_forward_pre_hook(lambda *_: None)
    before = hooks_on(model)
    owner = nn.Module if "Module" in target else torch.Tensor
    register = getattr(owner, target.rpartition(".")[2])
    calls: list[object] = []

    def fail(*args: object, **kwargs: object) -> object:
        calls.append(args[0])
        if len(calls) > num_good:
            raise Refusal
        return register(*args, **kwargs)

    mocker.patch(target, fail)
    with pytest.raises(Refusal):
        install(model)
    assert hooks_on(model) == before
    assert installed_handle(model) is None


def test_a_failure_of_the_delayed_registration_leaves_the_model_as_it_was() -> None:
    """It is the last to be made."""
    model = TwoLinear()

    def fail(hook: Callable[[], None]) -> None:
        raise Refusal

    model.second.register_wgrad_accumulation_and_reduce_hooks = fail  # type: ignore[method-assign]
    with pytest.raises(Refusal):
        install(model)
    assert hooks_on(model) == {}


def test_a_failing_scheduler_leaves_the_model_as_it_was() -> None:
    """It is made before the first hook."""
    model = TwoLinear()

    def fail(plan: HookPlan) -> NoReturn:
        raise Refusal

    with pytest.raises(Refusal):
        install_hooks(model, PLAN, fail, dict(model.named_parameters()))
    assert hooks_on(model) == {}


def test_a_hooked_model_goes_with_its_last_reference() -> None:
    """Its memory must not wait for the garbage collector."""
    model = TwoLinear()
    handle = install(model)
    points_of_a_step(model, handle)
    scheduler = weakref.ref(handle.scheduler)
    gone = weakref.ref(model)
    del handle
    assert scheduler() is not None
    del model
    assert (gone(), scheduler()) == (None, None)


def test_the_hooks_do_not_keep_the_scheduler_of_a_removed_handle() -> None:
    """The scheduler holds units and streams."""
    model = TwoLinear()
    handle = install(model)
    scheduler = weakref.ref(handle.scheduler)
    handle.remove()
    del handle
    assert scheduler() is None


def test_the_handle_is_no_part_of_the_state_dict() -> None:
    """A checkpoint of a hooked model loads into one without hooks."""
    model = TwoLinear()
    before = list(model.state_dict())
    install(model)
    assert list(model.state_dict()) == before
