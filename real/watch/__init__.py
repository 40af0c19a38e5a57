"""Records what code does by watching its own methods, so that it need not tell."""

from real.watch.points import Call, Point, watched

__all__ = ["Call", "Point", "watched"]
