"""Records as types say what the schema says."""

from __future__ import annotations

from typing import NotRequired, get_args, get_origin, get_type_hints

import pytest

from real.trace.record import FIELDS, OPTIONAL, OPTIONAL_OF, OpKind
from real.trace.typed import TYPES, Fence, Unshard, select


def test_every_operation_has_a_type_of_its_own() -> None:
    """Else its records could not be asked for."""
    assert list(TYPES) == list(OpKind)
    assert len(set(TYPES.values())) == len(TYPES)


@pytest.mark.parametrize("op", OpKind)
def test_a_type_has_the_fields_of_the_schema(op: OpKind) -> None:
    """A field that is written and not typed would be read as an error, and the reverse."""
    hints = get_type_hints(TYPES[op], include_extras=True)
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    assert hints.keys() - optional == {"seq", "op", *FIELDS[op]}
    assert optional == {*OPTIONAL, *OPTIONAL_OF[op]}


@pytest.mark.parametrize("op", OpKind)
def test_a_field_has_the_type_of_the_schema(op: OpKind) -> None:
    """Lists and settings say more than the schema's table, which names the container."""
    hints = get_type_hints(TYPES[op])
    for name, types in {**FIELDS[op], **OPTIONAL_OF[op]}.items():
        assert _plain(hints[name]) == set(types), name


def _plain(hint: object) -> set[type]:
    """Returns the classes of a type without what they contain."""
    origin = get_origin(hint)
    if origin in (list, dict):
        return {origin}
    return {hint} if origin is None else set(get_args(hint))


def test_records_are_asked_for_by_their_type() -> None:
    """In their order, and no others."""
    records = [
        {"seq": 1, "op": "fence", "stream": 0},
        {"seq": 2, "op": "unshard", "unit": "a", "stream": 1, "gathered": True},
        {"seq": 3, "op": "fence", "stream": 2},
    ]
    assert [record["stream"] for record in select(records, Fence)] == [0, 2]
    assert [record["unit"] for record in select(records, Unshard)] == ["a"]
