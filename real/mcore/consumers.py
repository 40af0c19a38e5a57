"""Who uses which parameter of a Megatron model, as the combined schedule cuts it into nodes.

Every schedule node runs its backward as an autograd pass of its own. A parameter used by several
nodes therefore accumulates once per node, and its unit is complete only after the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from real.hooks import FsdpUnit


@dataclass(frozen=True, kw_only=True)
class Consumers:
    """What the plan has to know about a model.

    Attributes:
        layers: Modules that the schedule releases after their forward.
        fires: Gradients per microbatch of the parameters that more than one node uses.
        borrowers: Modules that compute with a weight of another module: name to unit name.
        forward_order: Unit names in the order of the forward.
    """

    layers: tuple[str, ...]
    fires: Mapping[str, int]
    borrowers: Mapping[str, str]
    forward_order: tuple[str, ...]


def find_consumers(model: nn.Module, units: Mapping[str, FsdpUnit]) -> Consumers:
    """Reads the structure of a GPT model.

    Args:
        model: The root unit's module.
        units: All units by name.
    """
    layers: Sequence[str] = [f"decoder.layers.{i}" for i in range(len(model.decoder.layers))]
    return Consumers(
        layers=tuple(layers),
        fires={},
        borrowers={},
        forward_order=tuple(name for name in units if name),
    )
