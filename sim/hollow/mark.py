"""Marks storages whose values mean nothing.

The mark is on the storage and not on the tensor, so every view of a hollow tensor is hollow. It
goes when the storage goes.
"""

from __future__ import annotations

from typing import Any

import torch


def is_hollow(tensor: torch.Tensor) -> bool:
    """Tells whether the values of `tensor` mean nothing."""
    return getattr(tensor.untyped_storage(), "is_hollow", False)


def mark_hollow(tensor: torch.Tensor) -> None:
    """Says that the values of `tensor`, and of every other view of its storage, mean nothing."""
    storage: Any = tensor.untyped_storage()
    storage.is_hollow = True
