"""`CudaRNGStatesTracker`: named random states, over `torch.cuda`'s own state functions.

Source: transformer_engine 2.17.1, `pytorch/distributed.py`, the path without graph-safe states.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaRNGStatesTracker:
    """Keeps one random state for each name and swaps it in for the length of a `with` block."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns the states by name; a new dictionary of the same tensors."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Makes the state `name` from `seed`; the current random state is left as it was.

        Raises:
            RuntimeError: the name or the seed is taken.
        """
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws from the state `name` inside the block; it keeps its progress, also after an error.

        Raises:
            KeyError: the name was not added.
        """
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)
