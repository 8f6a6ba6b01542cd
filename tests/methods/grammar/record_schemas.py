"""Schemas of the kinds that people ask records by, each with what is special about it."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string", "maxLength": 12}
_WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}


def _record(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def _array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 3, **more}


def _either(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _record({"name": _TEXT, "age": _WHOLE, "member": {"type": "boolean"}}),
    "optional": _record({"a": _WHOLE, "b": _TEXT, "c": {"type": "null"}}, "a", "b", "c"),
    "optional in the middle": _record({"a": _WHOLE, "b": _TEXT, "c": _WHOLE}, "b"),
    "open": {"type": "object", "properties": {"id": _WHOLE}, "required": ["id"]},
    "required but not described": {"type": "object", "required": ["x"], "additionalProperties": _WHOLE},
    "nested objects": _record({"a": _record({"b": _record({"c": _record({"d": _WHOLE})})})}),
    "array of objects": _record({"rows": _array(_record({"k": _TEXT, "v": _WHOLE}), minItems=1)}),
    "array of arrays": _array(_array(_WHOLE)),
    "array of exactly two": _array({"type": "number"}, minItems=2, maxItems=2),
    "empty array": _record({"none": _array(_WHOLE, maxItems=0)}),
    "tuple": {"type": "array", "prefixItems": [_WHOLE, _TEXT], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [_WHOLE], "items": {"type": "boolean"}, "maxItems": 4},
    "enum": _record({"colour": {"enum": ["red", "green", "dark red"]}}),
    "enum of kinds": {"enum": [1, -2.5, "1", None, True, [1, "a"], {"k": []}]},
    "enum with escapes": {"enum": ['a"b', "back\\slash", "line\nline", "tab\t", "é", "😀", "/"]},
    "const": _record({"version": {"const": 2}, "kind": {"const": "event"}}),
    "const object": {"const": {"a": [1, {"b": None}], "c": "d"}},
    "anyOf": _either(_WHOLE, _TEXT, {"type": "null"}),
    "anyOf of objects": _either(_record({"a": _WHOLE}), _record({"a": _WHOLE, "b": _TEXT})),
    "anyOf beside properties": {**_record({"a": _WHOLE, "b": _WHOLE}, "a", "b"), "anyOf": [{"required": ["a"]}]},
    "nullable": _record({"x": {"type": ["string", "null"], "maxLength": 5}}),
    "oneOf types": {"oneOf": [_WHOLE, _TEXT, {"type": "array", "maxItems": 1}]},
    "oneOf constants": {"oneOf": [{"const": 1, "title": "one"}, {"const": 2}, {"const": "1"}]},
    "oneOf by a tag": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "Cat": _record({"kind": {"const": "cat"}, "lives": _WHOLE}),
            "Dog": _record({"kind": {"enum": ["dog", "wolf"]}, "name": _TEXT}),
        },
    },
    "allOf": {"allOf": [_record({"a": _WHOLE, "b": {}}), {"properties": {"b": _TEXT}}]},
    "allOf of bounds": {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]},
    "definitions": {
        "$ref": "#/$defs/P",
        "$defs": {"P": _record({"x": _WHOLE, "y": {"$ref": "#/$defs/Q"}}), "Q": _TEXT},
    },
    "reference to a property": _record({"a": _WHOLE, "b": {"$ref": "#/properties/a"}}),
    "reference with escapes": {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": _WHOLE}},
    "older definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": _WHOLE},
        **_record({"n": {"$ref": "#/definitions/n"}}),
    },
    "list of nodes": _record({"value": _WHOLE, "next": _either({"$ref": "#"}, {"type": "null"})}),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": _record({"v": _WHOLE, "children": _array({"$ref": "#/$defs/node"}, maxItems=2)})},
    },
    "two that name each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": _record({"b": {"$ref": "#/$defs/b"}}, "b"), "b": _record({"a": {"$ref": "#/$defs/a"}}, "a")},
    },
    "pattern": _record({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}}),
    "pattern anywhere": {"type": "string", "pattern": "(cat|dog)s?", "maxLength": 20},
    "pattern with escapes": {"type": "string", "pattern": r"^\d+(\.\d{2})? \$|^\\[a-f\"]+$"},
    "lengths": _record({"s": {"type": "string", "minLength": 3, "maxLength": 6}}),
    "length of Unicode": {"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^[é😀a]+$"},
    "dates": _record({"day": {"type": "string", "format": "date"}, "at": {"type": "string", "format": "date-time"}}),
    "time and duration": _record(
        {"t": {"type": "string", "format": "time"}, "d": {"format": "duration", "type": "string"}}
    ),
    "addresses": _record(
        {name: {"type": "string", "format": name, "maxLength": 40} for name in ("ipv4", "ipv6", "uuid", "email")}
    ),
    "places on the web": _record(
        {name: {"type": "string", "format": name, "maxLength": 30} for name in ("uri", "hostname")}
    ),
    "integer range": _record({"n": {"type": "integer", "minimum": -15, "maximum": 225}}),
    "number range": _record({"n": {"type": "number", "minimum": -1.5, "maximum": 2.25}}),
    "exclusive range": {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 1.0},
    "one bound": _array({"type": "number", "exclusiveMaximum": -3}, prefixItems=[{"type": "integer", "minimum": 7}]),
    "multiple": _array({"type": "integer", "multipleOf": 25, "maximum": 10_000}),
    "map": {"type": "object", "additionalProperties": _WHOLE, "minProperties": 1, "maxProperties": 3},
    "map beside a name": {"type": "object", "properties": {"a": _WHOLE}, "additionalProperties": {"type": "null"}},
    "map by pattern": {
        "type": "object",
        "properties": {"x_": {"minimum": 5}},
        "patternProperties": {"^x_": _WHOLE, "^y_": _TEXT},
        "additionalProperties": False,
    },
    "at least one": _record({"a": _WHOLE, "b": _TEXT}, "a", "b", minProperties=1),
    "Unicode names": _record({"prénom": _TEXT, "年齢": _WHOLE, 'quo"te': {"type": "null"}, "": _WHOLE}),
    "annotations": _record(
        {
            "a": {
                "type": "integer",
                "title": "A",
                "description": "of a",
                "default": 3,
                "examples": ["x"],
                "deprecated": True,
            }
        }
    ),
    "names like keywords": _record({"not": _WHOLE, "if": _TEXT, "$ref": {"const": "#"}, "format": {"const": "x"}}),
    "any value": {},
}
