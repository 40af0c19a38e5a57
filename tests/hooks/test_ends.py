"""Where the backward of one module ends inside the autograd pass of a whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from real.hooks import UnitScheduler
from real.hooks.ends import install_ends


class Log:
    """Stands for a scheduler; writes down the ends of units and the gradients before them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def end_backward(self, names: list[str], cause: str) -> None:
        self.lines += [f"end {name or '<root>'}" for name in names]

    def gradient(self, name: str, _: object) -> None:
        self.lines.append(name)


class Branched(nn.Module):
    """Two linear layers beside each other over two inputs, as experts and their probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4, bias=False)
        self.right = nn.Linear(4, 4, bias=False)

    def forward(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Computes."""
        output: torch.Tensor = self.right(self.left(value).relu() * scale)
        return output


class Model(nn.Module):
    """A root with a weight of its own around two units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.a = Branched()
        self.b = Branched()
        self.call: Callable[..., torch.Tensor] = lambda unit, *args: unit(*args)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Computes."""
        value = self.embed(value)
        for unit in (self.a, self.b):
            value = self.call(unit, value, value.sigmoid())
        return value.sum()


def logged(model: Model) -> tuple[Log, Callable[[], None]]:
    log = Log()
    undo = install_ends(cast(UnitScheduler, log), {"": model, "a": model.a, "b": model.b})
    for name, parameter in model.named_parameters():
        hook = functools.partial(log.gradient, name.removesuffix(".weight"))
        parameter.register_post_accumulate_grad_hook(hook)
    return log, undo


def checkpointed(unit: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = checkpoint(unit, *args, use_reentrant=True)
    return output


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_unit_ends_after_its_gradients_and_before_any_older_one(*, recomputes: bool) -> None:
    """Each ends once, whether its forward is kept or run again; the root ends with the pass."""
    model = Model()
    if recomputes:
        model.call = checkpointed
    log, _ = logged(model)
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
        assert log.lines == [
            *["b.right", "b.left", "end b"],
            *["a.right", "a.left", "end a"],
            *["embed", "end <root>"],
        ]
        log.lines.clear()


def test_a_unit_ends_without_a_gradient_too() -> None:
    """That is what the end is for."""
    model = Model()
    log, _ = logged(model)
    model.b.forward = lambda value, scale: value * scale  # type: ignore[method-assign]
    model(torch.ones(2, 4)).backward()
    assert log.lines == ["end b", "a.right", "a.left", "end a", "embed", "end <root>"]


def test_no_end_is_told_after_the_undoing() -> None:
    """A forward without gradients has no end either."""
    model = Model()
    log, undo = logged(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    undo()
    model(torch.ones(2, 4)).backward()
    assert [line for line in log.lines if line.startswith("end")] == []
