"""Objects that get no properties but those that are named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from drafter.methods.grammar.closing import closed


class Wheel(BaseModel):
    inches: int


class Bicycle(BaseModel):
    wheels: list[Wheel]
    colour: str | None = None


def test_named_properties_are_all_there_are() -> None:
    found = closed(Bicycle.model_json_schema())
    assert found["additionalProperties"] is False
    assert found["$defs"]["Wheel"]["additionalProperties"] is False
    assert closed({"type": "array", "items": {"properties": {"a": {}}}})["items"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"properties": {"a": {}}, "minProperties": 2},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}, "required": ["b"]}}},
        {"items": {"properties": {"a": {}}, "oneOf": [{"properties": {"b": {}}}]}},
        {"properties": 3},
        {"properties": {}, "required": 3},
    ],
)
def test_what_says_something_of_others_or_is_joined_stays(schema: Any) -> None:
    assert closed(schema) == schema
