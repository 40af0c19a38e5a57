"""Which experts a token goes to when the router's scores mean nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Chooses experts in place of a router.

    Attributes:
        imbalance: Tokens of the most loaded expert over the mean, 1 or more. Loads fall evenly from
            the first expert to the last, so the first rank has the most work.
        seed: Of the draws of an unbalanced routing.
    """

    imbalance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.imbalance < 2.0:
            raise ValueError(
                f"Expected a routing imbalance of at least 1 and below 2, got {self.imbalance}."
            )

    def choose(self, num_tokens: int, num_experts: int, num_chosen: int) -> torch.Tensor:
        """Returns the experts of each token, int64 [tokens, chosen], all different in a row."""
        if self.imbalance == 1.0:
            first = torch.arange(num_tokens).unsqueeze(1) * num_chosen
            return (first + torch.arange(num_chosen)) % num_experts
        loads = torch.linspace(self.imbalance, 2 - self.imbalance, num_experts)
        generator = torch.Generator().manual_seed(self.seed * 7919 + num_tokens)
        return torch.multinomial(
            loads.expand(num_tokens, -1), num_chosen, replacement=False, generator=generator
        )
