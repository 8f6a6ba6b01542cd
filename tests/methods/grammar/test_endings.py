"""What is checked at a record's end, compared with a validator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from drafter.errors import RequestError
from drafter.methods.grammar.endings import ending
from drafter.methods.grammar.schemas import checked_schema
from tests.support.properties import examples

_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.sampled_from([1.0, 0.5, 0.7, "a", "b"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=5,
)
SCHEMAS: list[Any] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "items": {"type": "array", "uniqueItems": True}, "uniqueItems": True},
    {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}, {"type": "object"}]},
    {"properties": {"a": {"$ref": "#/$defs/unique"}}, "$defs": {"unique": {"type": "array", "uniqueItems": True}}},
    {"prefixItems": [{"uniqueItems": True}, True], "items": {"multipleOf": 0.1}, "type": "array"},
    {"type": "object", "additionalProperties": {"allOf": [{"multipleOf": 0.1}]}},
    {"oneOf": [{"type": "number", "multipleOf": 0.1}, {"enum": ["a", "b"]}]},
]


@examples(150)
@given(st.sampled_from(SCHEMAS), _VALUES)
def test_what_holds_is_what_a_validator_says(schema: Any, value: Any) -> None:
    checked_schema(schema)
    holds = ending(schema)
    assert holds is not None
    assert holds(json.dumps(value)) == Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(("join", "leaf"), [("allOf", {"multipleOf": 0.1}), ("anyOf", {"type": "string"})])
def test_each_value_meets_each_part_once(join: str, leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 2 ** 12 ways to the leaf."""
    parts: dict[str, Any] = {f"a{n}": {join: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(12)}
    number = {"anyOf": [{"$ref": "#/$defs/a0"}, {"type": "number"}]} if join == "anyOf" else {"$ref": "#/$defs/a0"}
    schema = {"$defs": parts | {"a12": leaf}, "properties": {"a": number, "b": {"uniqueItems": True}}}
    holds, compared = ending(schema), list[Any]()
    assert holds is not None

    def count(schema: Any, _: Any) -> bool:
        compared.append(schema)
        return True

    monkeypatch.setattr("drafter.methods.grammar.endings._of_type", count)
    assert holds('{"a": 7, "b": [1, 2]}')
    assert not holds('{"a": 7, "b": [1, 1]}')
    assert len(compared) < 60


def test_what_a_grammar_follows_is_not_checked_again() -> None:
    for schema in ({"type": "array", "uniqueItems": False}, {"multipleOf": 5}, {"multipleOf": 0.25}, {}, True):
        assert ending(schema) is None
    holds = ending({"type": "array", "uniqueItems": True})
    assert holds is not None
    assert not holds("[" * 5000)


def test_a_list_of_different_values_ends_when_they_are_used_up() -> None:
    few: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/é"}, "uniqueItems": True}
    for values, most in (({"enum": ["a", "b", "c"]}, 3), ({"type": "boolean"}, 2), ({"const": 1}, 1)):
        checked = checked_schema({**few, "prefixItems": [{}], "$defs": {"é": values}})
        assert checked["maxItems"] == most + 1
    assert checked_schema({**few, "maxItems": 1, "$defs": {"é": {"enum": [1, 2]}}})["maxItems"] == 1
    assert "maxItems" not in checked_schema({**few, "$defs": {"é": {"type": "integer"}}})
    with pytest.raises(RequestError, match="enum must be a list"):
        checked_schema({**few, "$defs": {"é": {"enum": 3}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "array"}]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"properties": {"b": {"multipleOf": 0.1}}}}},
        {"patternProperties": {"^a": {"uniqueItems": True}}},
    ],
)
def test_where_it_cannot_be_told_it_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="uniqueItems and a fractional multipleOf"):
        checked_schema(schema)
