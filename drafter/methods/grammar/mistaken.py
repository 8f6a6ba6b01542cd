"""What is given in the place of a JSON schema and is none, so that it would allow anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ASSERTIONS = """
$ref $dynamicRef $recursiveRef additionalItems additionalProperties allOf anyOf const contains dependencies
dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems
maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern
patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties
uniqueItems"""
_ANNOTATIONS = """
$anchor $comment $defs $dynamicAnchor $id $recursiveAnchor $schema $vocabulary contentEncoding contentMediaType
contentSchema default definitions deprecated description discriminator examples readOnly title writeOnly"""
_SAYS, _ANNOTATES = frozenset(_ASSERTIONS.split()), frozenset(_ANNOTATIONS.split())
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def no_schema(schema: Mapping[str, Any], *, root: bool) -> str | None:
    """Return why an object is no schema, and what to do; None if it may be one.

    Names that JSON Schema does not know are annotations. Beside others they are left; alone they make no schema.
    """
    unknown = [name for name in schema if name not in _SAYS | _ANNOTATES and not name.startswith("x-")]
    says = schema.keys() & _SAYS
    given = schema.get("type", "object")
    for one in given if isinstance(given, list) else [given]:
        if one not in _TYPES:
            return _advice(schema, unknown, f"{str(one)[:80]!r} is no type of JSON, which are {', '.join(_TYPES)}")
    if not says and root and schema.keys() & {"$defs", "definitions"}:
        return "it has definitions and says nothing of the output: add a $ref to one of them"
    if says == {"type"} and (lost := next((name for name in unknown if _is_schema(schema[name])), None)) is not None:
        problem = f"{lost[:80]!r} is no keyword of JSON Schema, and holds a schema that would not be followed"
        return f"{problem}: put it into properties or items, or give it alone"
    if says or not unknown or not (root or not schema.keys() & _ANNOTATES):
        return None
    return _advice(schema, unknown, f"{str(unknown[0])[:80]!r} is no keyword of JSON Schema, and anything would fit")


def _is_schema(value: Any) -> bool:
    """Return whether what stands under an unknown name is plainly a schema, or has one under each of its names."""
    if not isinstance(value, Mapping):
        return False
    named = [value] if value.get("type") in _TYPES else [*value.values()]
    return bool(named) and all(isinstance(one, Mapping) and one.get("type") in _TYPES for one in named)


def _advice(schema: Mapping[str, Any], unknown: list[str], problem: str) -> str:
    for name in unknown:
        inner = schema[name]
        if isinstance(inner, Mapping) and (
            inner.keys() & _SAYS or any(isinstance(one, Mapping) for one in inner.values())
        ):
            return f"{problem}: give what is in {name[:80]!r}, if that is the schema"
    return f'{problem}: give a schema, such as {{"type": "object", "properties": …}}, and no example of a record'
