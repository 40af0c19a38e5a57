"""The plan: plain data about a model and its units."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from real.hooks import HookPlan, build_plan
from real.hooks.plan import DemandUnshard, GradientCount


class PlannedUnit:
    """A unit as the plan sees it: a name, a module, and full parameters."""

    unshard_event = None

    def __init__(self, root: nn.Module, name: str, inner: tuple[str, ...] = ()) -> None:
        self.name = name
        self.module = root.get_submodule(name)
        self.trainable_parameters: Mapping[str, nn.Parameter] = {
            full: parameter
            for full, parameter in root.named_parameters()
            if full.startswith(name)
            and not any(full.startswith(f"{other}.") for other in inner)
            and parameter.requires_grad
        }

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...


def two_layer_model() -> nn.Module:
    """An embedding, two layers (the first with experts in it), a head without a weight."""
    first = nn.ModuleDict({"norm": nn.LayerNorm(2, bias=False), "experts": nn.Linear(2, 2, False)})
    second = nn.ModuleDict({"norm": nn.LayerNorm(2, bias=False)})
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(3, 2),
            "layers": nn.ModuleList([first, second]),
            "head": nn.Identity(),
        }
    )


def units_of(model: nn.Module) -> dict[str, PlannedUnit]:
    inner = {
        "": ("layers.0", "layers.1"),
        "layers.0": ("layers.0.experts",),
        "layers.0.experts": (),
        "layers.1": (),
    }
    return {name: PlannedUnit(model, name, within) for name, within in inner.items()}


def plan_of(model: nn.Module, **options: object) -> HookPlan:
    layers = options.pop("layers", ["layers.0", "layers.1"])
    return build_plan(model, units_of(model), layers=layers, **options)  # type: ignore[arg-type]


def test_the_plan_of_a_small_model_is_complete() -> None:
    """Nothing is installed that is not in here."""
    model = two_layer_model()
    delayed = model.get_parameter("layers.0.experts.weight")
    plan = plan_of(
        model,
        fires={"embedding.weight": 2},
        borrowers={"head": ""},
        is_delayed=lambda parameter: parameter is delayed,
    )
    assert plan == HookPlan(
        demand=(
            DemandUnshard(module="embedding", unit=""),
            DemandUnshard(module="layers.0.norm", unit="layers.0"),
            DemandUnshard(module="layers.0.experts", unit="layers.0.experts"),
            DemandUnshard(module="layers.1.norm", unit="layers.1"),
            DemandUnshard(module="head", unit=""),
        ),
        gradients=(
            GradientCount(
                parameter="embedding.weight",
                unit="",
                module="embedding",
                fires=2,
                is_delayed=False,
            ),
            GradientCount(
                parameter="layers.0.norm.weight",
                unit="layers.0",
                module="layers.0.norm",
                fires=1,
                is_delayed=False,
            ),
            GradientCount(
                parameter="layers.0.experts.weight",
                unit="layers.0.experts",
                module="layers.0.experts",
                fires=1,
                is_delayed=True,
            ),
            GradientCount(
                parameter="layers.1.norm.weight",
                unit="layers.1",
                module="layers.1.norm",
                fires=1,
                is_delayed=False,
            ),
        ),
        releases={
            "layers.0": ("layers.0", "layers.0.experts"),
            "layers.1": ("layers.1",),
            "": ("",),
        },
    )


def test_a_plan_prints_one_line_for_each_hook() -> None:
    """A reader checks a plan by eye before it is installed."""
    model = two_layer_model()
    delayed = model.get_parameter("layers.0.experts.weight")
    plan = plan_of(model, fires={"embedding.weight": 2}, is_delayed=lambda p: p is delayed)
    assert str(plan).splitlines() == [
        "embedding -> unshard <root>",
        "layers.0.norm -> unshard layers.0",
        "layers.0.experts -> unshard layers.0.experts",
        "layers.1.norm -> unshard layers.1",
        "embedding.weight x2 -> reduce <root>",
        "layers.0.norm.weight x1 -> reduce layers.0",
        "layers.0.experts.weight x1 delayed -> reduce layers.0.experts",
        "layers.1.norm.weight x1 -> reduce layers.1",
    ]


def test_a_borrower_that_owns_a_parameter_gets_one_hook() -> None:
    """It gathers its own unit already; two hooks would name two owners."""
    plan = plan_of(two_layer_model(), borrowers={"embedding": ""})
    assert [d.module for d in plan.demand].count("embedding") == 1


def test_a_frozen_parameter_is_not_counted() -> None:
    """It gets no gradient, so a unit that waited for one would never reduce."""
    model = two_layer_model()
    model.get_parameter("layers.1.norm.weight").requires_grad_(False)
    plan = plan_of(model)
    assert "layers.1.norm.weight" not in {g.parameter for g in plan.gradients}
    assert "layers.1.norm" in {d.module for d in plan.demand}


def test_a_unit_outside_of_every_layer_is_released_by_the_root() -> None:
    """Otherwise nobody would."""
    plan = plan_of(two_layer_model(), layers=["layers.1"])
    assert plan.releases == {
        "layers.1": ("layers.1",),
        "": ("", "layers.0", "layers.0.experts"),
    }


def test_a_layer_does_not_release_its_namesake() -> None:
    """`layers.1` is a prefix of `layers.10`, not its parent."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(1, 1) for _ in range(11))})
    names = ["", "layers.1", "layers.10"]
    units = {name: PlannedUnit(model, name, tuple(names[1:]) if not name else ()) for name in names}
    plan = build_plan(model, units, layers=["layers.1", "layers.10"])
    assert plan.releases["layers.1"] == ("layers.1",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fires": {"head.weight": 2}},
            r"trainable parameters only, got \['head.weight'\]",
        ),
        ({"fires": {"embedding.weight": 0}}, "1 or more gradients of embedding.weight, got 0"),
        ({"borrowers": {"tail": ""}}, "known module and unit, got 'tail' -> ''"),
        ({"borrowers": {"head": "layers.7"}}, "known module and unit, got 'head' -> 'layers.7'"),
        ({"layers": ["layers.0", "layers.9"]}, r"layers of the model, got \['layers.9'\]"),
    ],
    ids=["count", "zero", "borrower", "lender", "layer"],
)
def test_an_unknown_name_is_refused(options: dict[str, object], message: str) -> None:
    """A misspelt name would leave a unit without its hook, which only a wrong gradient shows."""
    with pytest.raises(ValueError, match=message):
        plan_of(two_layer_model(), **options)


def test_a_count_of_a_frozen_parameter_is_refused() -> None:
    """Its gradient never comes, so its unit would stay open."""
    model = two_layer_model()
    model.get_parameter("embedding.weight").requires_grad_(False)
    with pytest.raises(ValueError, match="trainable parameters only"):
        plan_of(model, fires={"embedding.weight": 1})
