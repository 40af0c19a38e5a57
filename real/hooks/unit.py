"""What the hooks need from an FSDP implementation: one unit, and what its units share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn


class FsdpContext(Protocol):
    """Streams and state shared by all units of one root."""

    @property
    def all_gather_stream(self) -> torch.cuda.Stream:
        """Where full parameters are allocated, gathered and released."""
        ...

    @property
    def reduce_scatter_stream(self) -> torch.cuda.Stream:
        """Where gradients are reduced."""
        ...

    is_last_microbatch: bool
    """Whether reductions also finish the outer axis of a hybrid mesh."""


class FsdpUnit(Protocol):
    """One module whose own parameters are sharded and communicated together."""

    @property
    def name(self) -> str:
        """Full name under the root; the root's is the empty string."""
        ...

    @property
    def module(self) -> nn.Module:
        """The module that is the unit."""
        ...

    @property
    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Full parameters that get a gradient, by full name under the root."""
        ...

    @property
    def unshard_event(self) -> torch.cuda.Event | None:
        """Recorded on the all-gather stream after the gather; None while sharded."""
        ...

    def unshard(self) -> None:
        """Allocates, gathers and installs full parameters on the all-gather stream.

        Does nothing when they are there.
        """
        ...

    def reshard(self) -> None:
        """Installs the shards and releases full storage after the current stream's work."""
        ...

    def reduce_gradients(self) -> None:
        """Packs the full gradients on the current stream and reduces them on theirs."""
        ...
