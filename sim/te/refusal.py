"""How the stand-in says no: one error text, and functions and classes that raise it."""

from collections.abc import Callable
from typing import NoReturn


def not_modelled(feature: str) -> NotImplementedError:
    """Returns the error for `feature`, a noun phrase without an article; the caller raises it."""
    return NotImplementedError(f"The Transformer Engine stand-in does not model {feature}.")


def refuse_if(condition: object, feature: str) -> None:
    """Refuses `feature` when `condition` is truthy.

    Raises:
        NotImplementedError: `condition` is truthy.
    """
    if condition:
        raise not_modelled(feature)


def refusing_function(name: str, feature: str) -> Callable[..., NoReturn]:
    """Returns a function called `name` that refuses `feature` whenever it is called.

    Megatron imports many functions that a plain bf16 step never calls. They must be importable,
    or Megatron takes another branch at import than it takes on a GPU.
    """

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise not_modelled(feature)

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def refusing_class(name: str, feature: str) -> type:
    """Returns a class called `name` that refuses `feature` when it is constructed.

    It can be subclassed and used in `isinstance`, which is always False, since no instance exists.
    """

    def refuse(_cls: type, *_args: object, **_kwargs: object) -> NoReturn:
        raise not_modelled(feature)

    return type(name, (), {"__new__": refuse, "__doc__": f"Refused: {feature}."})
