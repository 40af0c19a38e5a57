"""Methods to watch, as a table: what is recorded before and after each call.

A table belongs to one tree (what is watched has that tree's names); the swap does not. Nothing is
kept of a call but what its two callbacks keep, and with nothing watched nothing is swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any


@dataclass(kw_only=True)
class Call:
    """One call of a watched method.

    Attributes:
        args: Positional arguments; the first is the object of a method.
        kwargs: Named arguments.
        result: What it returned; None before it has.
        noted: What `before` wants to tell `after`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    noted: dict[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Any:
        """The object whose method is called."""
        return self.args[0]


Watcher = Callable[[Call], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method that is watched.

    Attributes:
        owner: The class or module that has it; for a class, its own or an inherited method.
        name: Its name there.
        before: Called first, or None.
        after: Called when it has returned, or None. Not called when it raises.
        always: Called last in either case, or None: for what must be undone.
    """

    owner: Any
    name: str
    before: Watcher | None = None
    after: Watcher | None = None
    always: Watcher | None = None


@contextmanager
def watched(points: Sequence[Point]) -> Iterator[None]:
    """Watches some methods for the length of the block, the first point's callbacks outermost.

    Raises:
        AttributeError: An owner has no such method; nothing is watched then.
    """
    for point in points:
        if not hasattr(point.owner, point.name):
            owner = getattr(point.owner, "__qualname__", getattr(point.owner, "__name__", "?"))
            raise AttributeError(f"Expected {owner}.{point.name} to watch, got none.")
    with ExitStack() as stack:
        for point in reversed(points):
            stack.callback(_swap(point))
        yield


def _swap(point: Point) -> Callable[[], None]:
    is_own = point.name in vars(point.owner)
    original = getattr(point.owner, point.name)
    setattr(point.owner, point.name, _around(original, point))

    def undo() -> None:
        if is_own:
            setattr(point.owner, point.name, original)
        else:
            delattr(point.owner, point.name)

    return undo


def _around(original: Callable[..., Any], point: Point) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call(args=args, kwargs=kwargs)
        if point.before is not None:
            point.before(call)
        try:
            call.result = original(*args, **kwargs)
            if point.after is not None:
                point.after(call)
        finally:
            if point.always is not None:
                point.always(call)
        return call.result

    return run
