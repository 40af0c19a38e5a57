"""Runs at full size without arithmetic: tensors have shapes and sizes, big ones have no values."""

from sim.hollow.mark import is_hollow, mark_hollow

__all__ = ["is_hollow", "mark_hollow"]
