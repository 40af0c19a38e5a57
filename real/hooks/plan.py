"""The plan: which submodule gathers which unit, and which gradients complete which unit.

A plan is plain data, so it can be printed, compared and tested without a stream. `install` turns a
valid plan into hooks and does not check it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from real.hooks.owner import owned_modules
from real.hooks.unit import FsdpUnit


@dataclass(frozen=True, kw_only=True)
class DemandUnshard:
    """Before `module` computes, forward or backward, `unit` is unsharded."""

    module: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class GradientCount:
    """`parameter` gets `fires` gradients per microbatch before `unit` may reduce.

    Attributes:
        fires: Number of schedule nodes that use the parameter: each node's backward is an autograd
            pass of its own and accumulates once.
        is_delayed: The gradient comes from a later weight-gradient call, not from autograd.
        module: The submodule that owns the parameter.
    """

    parameter: str
    unit: str
    module: str
    fires: int
    is_delayed: bool


@dataclass(frozen=True, kw_only=True)
class HookPlan:
    """Everything that is installed on one model, in order.

    Attributes:
        demand: Modules that gather their unit on demand.
        gradients: Gradients that are counted.
        releases: Modules whose forward ends the forward use of the units named with them. The
            combined schedule says so after a layer's last node; a module that is called as a whole
            says so itself.
    """

    demand: tuple[DemandUnshard, ...]
    gradients: tuple[GradientCount, ...]
    releases: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [f"{d.module or '<root>'} -> unshard {d.unit or '<root>'}" for d in self.demand]
        lines += [
            f"{g.parameter} x{g.fires}{' delayed' if g.is_delayed else ''}"
            f" -> reduce {g.unit or '<root>'}"
            for g in self.gradients
        ]
        return "\n".join(lines)


def build_plan(
    root: nn.Module,
    units: Mapping[str, FsdpUnit],
    *,
    layers: Sequence[str],
    fires: Mapping[str, int] | None = None,
    borrowers: Mapping[str, str] | None = None,
    is_delayed: Callable[[nn.Parameter], bool] = lambda _: False,
) -> HookPlan:
    """Plans the hooks of one model.

    Args:
        root: The outermost unit's module.
        units: All units by full name; the root's name is the empty string.
        layers: Names of the modules that the schedule releases after their forward, with every unit
            inside.
        fires: Gradients per microbatch by parameter name; 1 for the names that are not in it.
        borrowers: Modules that compute with another unit's weight: name to unit name. They own no
            parameter, yet their backward may be the first to read it.
        is_delayed: Whether a full parameter's gradient comes from a later weight-gradient call.

    Raises:
        ValueError: A name is unknown, a count is below 1, or a trainable parameter has no owner.
    """
    fires = dict(fires or {})
    borrowers = dict(borrowers or {})
    module_names = {name for name, _ in root.named_modules()}
    unit_of_module = {id(unit.module): name for name, unit in units.items()}
    owned = list(owned_modules(root, lambda module: id(module) in unit_of_module))
    demand = [DemandUnshard(module=o.name, unit=o.unit) for o in owned]
    for module, owner in borrowers.items():
        if module not in module_names or owner not in units:
            raise ValueError(f"Expected a known module and unit, got {module!r} -> {owner!r}.")
        if all(d.module != module for d in demand):
            demand.append(DemandUnshard(module=module, unit=owner))
    gradients = []
    for unit_name, unit in units.items():
        for parameter_name, parameter in unit.trainable_parameters.items():
            count = fires.pop(parameter_name, 1)
            if count < 1:
                raise ValueError(f"Expected 1 or more gradients of {parameter_name}, got {count}.")
            gradients.append(
                GradientCount(
                    parameter=parameter_name,
                    unit=unit_name,
                    module=parameter_name.rpartition(".")[0],
                    fires=count,
                    is_delayed=is_delayed(parameter),
                )
            )
    if fires:
        raise ValueError(f"Expected counts of trainable parameters only, got {sorted(fires)}.")
    missing = [name for name in layers if name not in module_names]
    if missing:
        raise ValueError(f"Expected layers of the model, got {missing}.")
    releases = {
        layer: tuple(name for name in units if name == layer or name.startswith(f"{layer}."))
        for layer in layers
    }
    released = {name for names in releases.values() for name in names}
    releases[""] = tuple(name for name in units if name not in released)
    return HookPlan(demand=tuple(demand), gradients=tuple(gradients), releases=releases)
