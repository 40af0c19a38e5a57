"""How often a weight's gradient comes, read off the structure of a model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from real.mcore.consumers import Consumers, find_consumers


class NamedUnit:
    """A unit with parameters of given names."""

    unshard_event = None

    def __init__(self, name: str, *parameters: str) -> None:
        self.name = name
        self.module = nn.Identity()
        self.trainable_parameters: Mapping[str, nn.Parameter] = {
            parameter: nn.Parameter(torch.ones(1)) for parameter in parameters
        }

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...


class TwoLayerShape(nn.Module):
    """The parts of a model that are looked at."""

    def __init__(self, *, num_mtp: int = 0, is_tied: bool = False) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
        if num_mtp:
            self.mtp = nn.Module()
            self.mtp.layers = nn.ModuleList(nn.Identity() for _ in range(num_mtp))
        self.share_embeddings_and_output_weights = is_tied


WORD, POSITION = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
UNITS = {
    "decoder.layers.0": NamedUnit("decoder.layers.0", "decoder.layers.0.weight"),
    "": NamedUnit("", WORD, POSITION, "output_layer.weight"),
    "decoder.layers.1": NamedUnit("decoder.layers.1"),
}


@pytest.mark.parametrize(
    ("shape", "is_combined", "fires"),
    [
        (TwoLayerShape(), True, {WORD: 1, POSITION: 1}),
        (TwoLayerShape(is_tied=True), True, {WORD: 2, POSITION: 1}),
        (TwoLayerShape(num_mtp=1), True, {WORD: 2, POSITION: 2}),
        (TwoLayerShape(num_mtp=1, is_tied=True), True, {WORD: 3, POSITION: 2}),
        (TwoLayerShape(num_mtp=1, is_tied=True), False, {}),
    ],
    ids=["one-consumer", "tied", "mtp", "mtp-tied", "plain-schedule"],
)
def test_each_node_that_reads_a_weight_is_counted(
    shape: TwoLayerShape, is_combined: bool, fires: dict[str, int]
) -> None:
    """Under the combined schedule each node's backward accumulates by itself."""
    assert find_consumers(shape, UNITS, is_combined=is_combined).fires == fires


def test_a_frozen_weight_is_not_counted() -> None:
    """The plan refuses counts of parameters that have no gradient."""
    units = {**UNITS, "": NamedUnit("", POSITION)}
    shape = TwoLayerShape(is_tied=True)
    assert find_consumers(shape, units, is_combined=True).fires == {POSITION: 1}


def test_a_tied_model_is_described_completely() -> None:
    """Layers, borrowers and order come from the same walk."""
    assert find_consumers(
        TwoLayerShape(num_mtp=1, is_tied=True), UNITS, is_combined=True
    ) == Consumers(
        layers=("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.mtp_model_layer"),
        fires={WORD: 3, POSITION: 2},
        borrowers={"output_layer": ""},
        forward_order=("decoder.layers.0", "decoder.layers.1"),
    )
