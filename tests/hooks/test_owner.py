"""Which unit owns which submodule."""

from collections.abc import Collection

import pytest
import torch
from torch import nn

from real.hooks.owner import owned_modules


class Experts(nn.Module):
    """Two projections, as one unit inside a layer that is another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.down = nn.Linear(2, 2)


class Layer(nn.Module):
    """A weight of its own, a normalisation, a module without parameters, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.LayerNorm(2)
        self.identity = nn.Identity()
        self.experts = Experts()


class TwoLayers(nn.Module):
    """An embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(2, 3)


def owners(root: nn.Module, units: Collection[nn.Module]) -> list[tuple[str, str]]:
    return [(owned.name, owned.unit) for owned in owned_modules(root, lambda m: m in units)]


def test_every_submodule_belongs_to_its_nearest_unit() -> None:
    """Experts inside a layer must gather themselves and not the layer."""
    model = TwoLayers()
    first, second = model.layers
    assert owners(model, {model, first, first.experts, second}) == [
        ("embedding", ""),
        ("layers.0", "layers.0"),
        ("layers.0.norm", "layers.0"),
        ("layers.0.experts.up", "layers.0.experts"),
        ("layers.0.experts.down", "layers.0.experts"),
        ("layers.1", "layers.1"),
        ("layers.1.norm", "layers.1"),
        ("layers.1.experts.up", "layers.1"),
        ("layers.1.experts.down", "layers.1"),
        ("head", ""),
    ]


def test_a_unit_owns_the_parameters_that_it_holds_itself() -> None:
    """Its own parameters are sharded with it, not with the unit around it."""
    layer = Layer()
    outer = nn.Sequential(layer)
    assert owners(outer, {outer, layer})[0] == ("0", "0")


def test_a_module_without_parameters_of_its_own_is_left_out() -> None:
    """A hook on it can run after its unit's gradients are complete and gather the unit again."""
    model = TwoLayers()
    names = [name for name, _ in owners(model, {model})]
    assert not {"", "layers", "layers.0.identity", "layers.0.experts"} & set(names)


def test_a_shared_module_is_visited_once() -> None:
    """Two hooks on one module would be one hook too many."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared)})
    assert owners(model, {model}) == [("first", "")]


def test_a_module_that_contains_itself_ends_the_visit() -> None:
    """Back references to a parent are common in user code."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].add_module("parent", model)
    assert owners(model, {model}) == [("0", "")]


def test_the_root_must_be_a_unit() -> None:
    """Otherwise the parameters outside of every unit would have no owner."""
    model = TwoLayers()
    with pytest.raises(ValueError, match="Expected the root TwoLayers to be an FSDP unit"):
        owners(model, set(model.layers))
