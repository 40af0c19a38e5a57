"""Who uses which parameter of a Megatron model, as the combined schedule cuts it into nodes.

Every schedule node runs its backward as an autograd pass of its own. A parameter used by several
nodes therefore accumulates once per node, and its unit is complete only after the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def find_consumers(model: Any, units: Mapping[str, FsdpUnit], *, is_combined: bool) -> Consumers:
    """Reads the structure of a GPT or hybrid model.

    Args:
        model: The root unit's module.
        units: All units by name.
        is_combined: Whether the combined schedule runs; the plain one has a single autograd pass,
            so every parameter accumulates once.
    """
    layers = [f"decoder.layers.{name}" for name, _ in model.decoder.layers.named_children()]
    mtp = getattr(model, "mtp", None)
    num_mtp = 0 if mtp is None else len(mtp.layers)
    # The schedule releases the transformer layer inside a prediction layer, not its projections.
    layers += [f"mtp.layers.{i}.mtp_model_layer" for i in range(num_mtp)]
    is_tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
    trainable = {name for unit in units.values() for name in unit.trainable_parameters}
    # The first node embeds the tokens, and so does each prediction layer's own first node; the last
    # node projects with the embedding's weight when the two are tied.
    fires = {
        "embedding.word_embeddings.weight": 1 + num_mtp + is_tied,
        "embedding.position_embeddings.weight": 1 + num_mtp,
    }
    return Consumers(
        layers=tuple(layers),
        fires={n: count for n, count in fires.items() if is_combined and n in trainable},
        # A tied projection owns no weight, and its backward is the first to read the embedding's.
        borrowers={"output_layer": ""} if is_tied else {},
        forward_order=tuple(name for name in units if name),
    )
