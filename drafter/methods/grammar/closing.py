"""Objects whose schema names properties and says nothing of others get no others.

JSON Schema would allow any. What is meant is mostly a record, and a model that may go on with properties of its own
does not stop. OpenAI's strict mode asks for `additionalProperties: false`, and Pydantic's schemas do not have it.
"""

from __future__ import annotations

from typing import Any

from drafter.methods.grammar.places import mapped

_SAYS_MORE = {"patternProperties", "additionalProperties", "minProperties"}
_OF_OBJECTS = {"properties", "required", "maxProperties", *_SAYS_MORE}
_JOINS = {"allOf", "anyOf", "oneOf", "$ref"}


def closed(schema: Any) -> Any:
    """Return a schema in which such objects have `additionalProperties: false`; what it allows, `schema` does, too.

    Where parts of objects are joined, by `allOf`, or beside `anyOf` or `$ref`, it stays as it is: a property that one
    part does not name may be another one's.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    found = "allOf" in schema or bool(schema.keys() & _OF_OBJECTS and schema.keys() & _JOINS)
    inside = list[bool]()
    mapped(schema, lambda _, inner: inside.append(_joins(inner)))
    return found or any(inside)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = mapped(schema, lambda _, inner: _closed(inner))
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not {*map(str, required)} <= named.keys():
        return found
    return found if schema.keys() & _SAYS_MORE else {**found, "additionalProperties": False}
