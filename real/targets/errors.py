"""What is raised for a target that cannot be built."""

from __future__ import annotations


class TargetError(ValueError):
    """A target that cannot be built: no such name, or a tree that lacks what it needs."""
