"""What is swapped is back afterwards, in the form that it had."""

from __future__ import annotations

from typing import Any

import pytest

from sim.swap import owner_of, swapped


class Parent:
    def inherited(self) -> str:
        return "inherited"


class Child(Parent):
    @staticmethod
    def static() -> str:
        return "static"

    def own(self) -> str:
        return "own"


def shouting(original: Any) -> Any:  # noqa: ANN401 - any attribute
    return lambda *args: original(*args).upper()


@pytest.mark.parametrize("name", ["own", "static", "inherited"])
def test_an_attribute_of_a_class_is_as_before(name: str) -> None:
    """Also a static method, and one that the class only inherits."""
    before = dict(vars(Child))
    with swapped(Child, name, lambda original: shouting(lambda *_: name)):
        assert getattr(Child(), name)() == name.upper()
    assert dict(vars(Child)) == before
    assert getattr(Child(), name)() == name


def test_an_object_gets_its_class_s_method_back_after_an_error() -> None:
    child = Child()
    with pytest.raises(KeyError, match="OWN"), swapped(child, "own", shouting):
        raise KeyError(child.own())
    assert vars(child) == {}


def test_a_dotted_name_has_an_owner() -> None:
    import json.decoder

    assert owner_of("json.decoder.JSONDecoder.decode") == (json.decoder.JSONDecoder, "decode")
    assert owner_of("json.decoder.scanner") == (json.decoder, "scanner")
