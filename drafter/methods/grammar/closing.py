"""Names of properties: `propertyNames` written as those that they allow, and objects that get no others.

Of properties that a schema does not name, JSON Schema would allow any. What is meant is mostly a record, and a model
that may go on with properties of its own does not stop. OpenAI's strict mode asks for `additionalProperties: false`,
and Pydantic's schemas do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.methods.grammar.formats import FORMATS
from drafter.methods.grammar.places import mapped, target

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


_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment"}
_MOST_REFERENCES = 100


def with_names(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Return a schema without `propertyNames`, where what they allow can be listed or is one regular expression.

    A listed name has a property of its own. Otherwise `propertyNames` stay.
    """
    names, rest = (
        schema.get("propertyNames"),
        {name: value for name, value in schema.items() if name != "propertyNames"},
    )
    for _ in range(_MOST_REFERENCES):
        names = target(root, names["$ref"]) if isinstance(names, dict) and names.keys() == {"$ref"} else names
    if not isinstance(names, dict) or "patternProperties" in schema:
        return dict(schema)
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    listed = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(listed, list) and isinstance(properties, dict) and names.keys() <= {*_ANNOTATIONS, "const", "enum"}:
        allowed = {name: properties.get(name, others) for name in listed if isinstance(name, str)}
        return {**rest, "properties": allowed, "additionalProperties": False}
    pattern = _pattern({name: value for name, value in names.items() if name not in _ANNOTATIONS})
    if pattern is None or properties:
        return dict(schema)
    return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False} if pattern else rest


def _pattern(names: dict[str, Any]) -> str | None:
    """Return the expression that names must match, empty for any names; None if it is not one."""
    if not names:
        return ""
    if names.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    parts = FORMATS.get(str(names["format"]), ()) if names.keys() == {"format"} else ()
    return str(parts[0]["pattern"]) if len(parts) == 1 else None
