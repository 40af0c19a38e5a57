"""Every stand-in has the name and the parameters of what it stands for, in the installed torch."""
# ruff: noqa: ANN401 - bodies return, and torch takes, anything

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from real.trace import Recorder
from sim.cuda import FakeDevice, fake_cuda, patch, use_device
from sim.cuda.tensors import NEW_METHODS

_BUILT_IN = {
    "to",
    "cuda",
    "type",
    "record_stream",
    "resize_",
    "nbytes",
    "Generator",
    *NEW_METHODS,
}
"""Written in C++ without a signature that Python can read."""

_NOT_MODELLED: dict[str, set[str]] = {"Event": {"event_id"}}
"""Public names of a class that only a record of the fake runtime could need."""

_YOUNGER_THAN_SOME_TORCH = {"is_capturing"}
"""Public names that the oldest supported torch lacks."""

_YOUNGER_PARAMETERS = {"enable_annotations", "check_input_liveness"}
"""Parameters that the oldest supported torch lacks."""

_TABLE = patch.swap_table()
_STAND_INS = [
    swap
    for swap in _TABLE
    if getattr(swap.stand_in, "__module__", "").startswith("sim.cuda.")
    and swap.stand_in.__module__ != patch.__name__
]
_CALLABLES = [swap for swap in _STAND_INS if callable(swap.stand_in)]
_CLASSES = [swap for swap in _STAND_INS if inspect.isclass(swap.stand_in)]


def _original(swap: patch.Swap) -> Any:
    return getattr(swap.owner, swap.name)


def _label(swap: patch.Swap) -> str:
    return f"{getattr(swap.owner, '__name__', swap.owner)}.{swap.name}"


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Returns names, kinds and defaults; annotations are not compared."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in _YOUNGER_PARAMETERS]


def _public_names(cls: type) -> set[str]:
    owners = [owner for owner in cls.__mro__ if owner is not object]
    return {name for owner in owners for name in vars(owner) if not name.startswith("_")}


@pytest.mark.parametrize("swap", _CALLABLES, ids=_label)
def test_parameters_are_those_of_torch(swap: patch.Swap) -> None:
    if swap.name in _BUILT_IN:
        pytest.skip("no signature to read")
    assert _parameters(swap.stand_in) == _parameters(_original(swap))


@pytest.mark.parametrize("name", sorted(_BUILT_IN))
def test_built_in_names_have_no_signature_to_compare(name: str) -> None:
    """When torch gives them one, they belong into the comparison."""
    [original] = {_original(swap) for swap in _TABLE if swap.name == name}
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(original)


@pytest.mark.parametrize("swap", _CLASSES, ids=_label)
def test_classes_have_the_public_names_of_torch(swap: patch.Swap) -> None:
    real, fake = _public_names(_original(swap)), _public_names(swap.stand_in)
    # Attributes that an instance gets when it is made.
    instance = set(getattr(swap.stand_in, "__annotations__", {}))
    if "__getattr__" not in vars(swap.stand_in):  # else what is missing fails with its name
        assert real - fake - instance - _NOT_MODELLED.get(swap.name, set()) == set()
    assert fake - real - _YOUNGER_THAN_SOME_TORCH == set()


@pytest.mark.parametrize("swap", _CLASSES, ids=_label)
def test_methods_have_the_parameters_of_torch(swap: patch.Swap) -> None:
    real = _original(swap)
    for name in _public_names(real) & _public_names(swap.stand_in):
        method = getattr(real, name)
        try:
            expected = _parameters(method)
        except (TypeError, ValueError):
            continue  # an attribute, or written in C++
        assert _parameters(getattr(swap.stand_in, name)) == expected, name


@pytest.mark.parametrize("swap", _TABLE, ids=_label)
def test_every_swapped_name_exists_in_torch(swap: patch.Swap) -> None:
    """A name that torch does not have would be made up."""
    assert hasattr(swap.owner, swap.name)


def test_stream_and_event_attributes_have_torchs_types() -> None:
    with fake_cuda(), use_device(FakeDevice(3, Recorder())):
        stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event()
        assert stream.device == event.device == torch.device("cuda", 3)
        assert (stream.priority, stream.device_index, stream.device_type) == (-1, 3, 1)
        assert isinstance(stream.stream_id, int)
        assert isinstance(stream.cuda_stream, int)
        assert stream.query() is True
        assert event.query() is True
