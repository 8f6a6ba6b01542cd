"""Checks JSON schemas before they are compiled, and writes them in the part of the language that llguidance enforces.

A schema is read as draft 2020-12, whatever its `$schema` names. What llguidance would let through although a validator
rejects it is refused by its place and name, or written as something that llguidance enforces.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from drafter.errors import RequestError, printable, shown
from drafter.methods.grammar.closing import with_names
from drafter.methods.grammar.disjoint import disjoint
from drafter.methods.grammar.endings import leading_to_late
from drafter.methods.grammar.formats import FORMATS, NOT_FOLLOWED, pattern_problem
from drafter.methods.grammar.numbers import BOUNDS, LARGEST_MULTIPLE, can_follow, with_parts
from drafter.methods.grammar.places import LISTS, MAPS, SINGLES, Place, at, is_plain, mapped, place_of, pointer, target

MOST_PROPERTIES = 5000
MOST_OPTIONAL = 1500
"""llguidance compiles an object in time that goes by the square of its optional properties: half a second for these."""
MOST_COUNTED = 64
"""Optional properties of a schema with `minProperties` or `maxProperties`; time goes by their third power."""
DEEPEST = 10
"""Levels of objects and arrays."""
MOST_VALUES = 1000
"""Of all `enum`s."""
SHORT_ENUM, LONGEST_ENUM = 250, 15_000
"""An `enum` of more values than the first may have as many characters as the second."""
MOST_BRANCHES = 100
"""Of a `oneOf`, whose branches are compared in pairs."""
LARGEST_NUMBER, SMALLEST_NUMBER = 2**53, 1e-7
MOST_DIGITS = 15
"""Beyond these, decimal numbers share floats with their neighbours, and llguidance reads one as another."""

_DEEPER = ("properties", "patternProperties", "prefixItems", *SINGLES)
_DEEPEST_PLACE = 100  # Python recurses once for each schema in a schema, and JSON parsers stop at 128 brackets
_DROPPED = ("$schema", "$id", "x-guidance", "uniqueItems")  # x-guidance would set options of the parser
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LARGEST_COUNT = 10**9
_WRITABLE = "\b\t\n\f\r"  # control characters with an escape of one letter

_LATE = (
    "uniqueItems and a fractional multipleOf need branches of anyOf that can be told apart, by their types, say, and "
    "cannot be in patternProperties"
)
_CASES = "list the cases in anyOf"
_NAMED = "put the schema into $defs, and refer to it by #/$defs/NAME"
REFUSED = {
    "not": "say what is allowed instead",
    **dict.fromkeys(("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"), _CASES),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "describe the array by prefixItems and items"),
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "additionalItems": "use prefixItems and items",
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"), _NAMED),
}
"""Keywords of JSON Schema that are not followed, and what to do instead."""


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return a schema that allows what the given one allows, of which llguidance enforces every part.

    Raises:
        RequestError: It is too large, or has a part that cannot be enforced; the message names the place.
    """
    reading = _Reading(schema)
    checked: Any = reading.read(schema, (), 0)
    reading.finish()
    return {} if checked is True else reading.with_definitions(checked)


def refusal(place: Place, problem: str) -> RequestError:
    """Return the error for what is wrong at a place of a schema."""
    where = f" at {printable('.'.join(place))[:200]}" if place else ""
    return RequestError(f"structured_outputs.json cannot be used{where}: {problem}")


@dataclass
class _Reading:
    """One walk through a schema, and what is known of all its places at the end."""

    root: Any
    properties: int = 0
    optional: int = 0
    values: int = 0
    multiples: set[Fraction] = field(default_factory=set)
    found: set[Place] = field(default_factory=set)
    references: dict[Place, str] = field(default_factory=dict)
    counted: list[Place] = field(default_factory=list)
    choices: dict[Place, Any] = field(default_factory=dict)
    moved: dict[Place, str] = field(default_factory=dict)

    def read(self, schema: Any, place: Place, level: int) -> Any:
        """Check a schema that lies `level` objects and arrays deep, and return it as it is to be compiled."""
        self.found.add(place)
        if schema is True or (schema is False and place):
            return schema
        if not isinstance(schema, dict):
            raise refusal(place, "a schema must be an object, or a boolean inside of another, and allow something")
        if level > DEEPEST or len(place) > _DEEPEST_PLACE:
            raise refusal(place[:8], f"there may be up to {DEEPEST} levels of objects and arrays: make it flatter")
        if problem := no_schema(schema, root=not place):
            raise refusal(place, problem)
        schema = with_names(schema, self.root)
        self._check_keywords(schema, place)
        self._check_texts(schema, place)
        self._check_numbers(schema, place)
        self._count(schema, place)
        schema = self._with_most_items(schema)
        read = mapped(schema, lambda tail, inner: self.read(inner, (*place, *tail), level + (tail[0] in _DEEPER)))
        return self._written(read, place)

    def finish(self) -> None:
        """Check what is only known when all places are."""
        for place, reference in self.references.items():
            if place_of(reference, self.root) not in self.found:
                raise refusal(
                    (*place, "$ref"), f"{reference!r} is not a place of this schema: give one such as #/$defs/NAME"
                )
        for place in leading_to_late(self.root):
            overlapping = place in self.choices and not disjoint(self.choices[place], self.root)
            if overlapping or (place[-2:-1] == ("patternProperties",) and at(self.root, place) is not None):
                raise refusal(place, _LATE)
        limits = [
            (self.properties, MOST_PROPERTIES, "properties in all"),
            (self.optional, MOST_OPTIONAL, "properties in all that are not required"),
            (self.values, MOST_VALUES, "values of enum in all"),
            (_common(self.multiples), LARGEST_MULTIPLE, "as least common multiple of all multipleOf"),
        ]
        for number, most, what in limits:
            if number > most:
                raise refusal((), f"there may be up to {most} {what}, and there are {number}: make it smaller")
        if self.counted and self.optional > MOST_COUNTED:
            raise refusal(
                self.counted[0],
                f"minProperties and maxProperties need a schema of up to {MOST_COUNTED} properties that are not "
                "required: remove them, or require more",
            )

    def _check_keywords(self, schema: dict[str, Any], place: Place) -> None:
        for name, instead in REFUSED.items():
            if name in schema:
                raise refusal((*place, name), f"{name} is not supported: {instead}")
        if "$id" in schema and place:
            raise refusal((*place, "$id"), f"$id is supported at the root alone: {_NAMED}")
        for names, kind, called in ((MAPS, dict, "an object"), (LISTS, list, "a list"), (("enum",), list, "a list")):
            for name in names:
                if name in schema and not (isinstance(schema[name], kind) and (schema[name] or kind is dict)):
                    raise refusal((*place, name), f"{name} must be {called} that is not empty")
        if isinstance(schema.get("items"), list):
            raise refusal((*place, "items"), "items must be one schema: use prefixItems for a list of them")
        if "$ref" in schema:
            if not (isinstance(reference := schema["$ref"], str) and reference.startswith("#")):
                raise refusal((*place, "$ref"), f"$ref must lead to a place of this schema: {_NAMED}")
            self.references[place] = reference

    def _check_texts(self, schema: dict[str, Any], place: Place) -> None:
        for name in ("pattern", "patternProperties"):
            for text in [schema[name]] if name == "pattern" and name in schema else schema.get(name, ()):
                if problem := pattern_problem(text):
                    raise refusal((*place, name), problem)
        if "format" in schema and _may_be_text(schema) and str(schema["format"]) in NOT_FOLLOWED:
            raise refusal(
                (*place, "format"),
                f"format {schema['format']!r} is not supported: remove it, use pattern, or one of {', '.join(FORMATS)}",
            )

    def _check_numbers(self, schema: dict[str, Any], place: Place) -> None:
        for name in BOUNDS:
            if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
                raise refusal((*place, name), f"{name} must be a number")
        for name in _COUNTS:
            if name in schema and not (type(schema[name]) is int and 0 <= schema[name] <= _LARGEST_COUNT):
                raise refusal((*place, name), f"{name} must be a whole number from 0 to {_LARGEST_COUNT}")
        if "multipleOf" in schema:
            if not (schema["multipleOf"] > 0 and can_follow(schema["multipleOf"])):
                raise refusal(
                    (*place, "multipleOf"),
                    f"multipleOf must be a number above 0, of up to {LARGEST_MULTIPLE} units of its last decimal",
                )
            self.multiples.add(Fraction(str(schema["multipleOf"])))
        self.choices |= {(*place, name): schema[name] for name in ("anyOf", "oneOf") if name in schema}

    def _count(self, schema: dict[str, Any], place: Place) -> None:
        listed = schema.get("required", [])
        required = set(listed) if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else set()
        properties = schema.get("properties", {})
        self.properties += len(properties)
        self.optional += len(properties.keys() - required)
        least = schema.get("minProperties", 0)
        if least > len(required) + 1:
            # A name that is not listed can be written twice, and counts as one.
            raise refusal(
                (*place, "minProperties"),
                "minProperties may be one more than the number of required properties, no more: require them by name",
            )
        if least or "maxProperties" in schema:
            self.counted.append(place)
        for name in ("const", "enum"):
            if name in schema:
                _check_value(schema[name], (*place, name))
        if values := schema.get("enum"):
            self.values += len(values)
            length = sum(len(one) for one in values if isinstance(one, str))
            if len(values) > SHORT_ENUM and length > LONGEST_ENUM:
                raise refusal(
                    (*place, "enum"),
                    f"an enum of more than {SHORT_ENUM} values may have {LONGEST_ENUM} characters, not {length}",
                )

    def _written(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        """Return a schema by keywords that llguidance enforces."""
        written = {name: value for name, value in schema.items() if name not in _DROPPED}
        joined = list[dict[str, Any]]()
        if "format" in written and (form := str(written["format"])) and _may_be_text(written):
            del written["format"]
            joined += FORMATS.get(form, ())
        if "oneOf" in written:
            branches = written.pop("oneOf")
            if len(branches) > MOST_BRANCHES or not disjoint(branches, self.root):
                raise refusal(
                    (*place, "oneOf"),
                    f"oneOf needs up to {MOST_BRANCHES} branches of different types, or with a required property that "
                    "has other values in each: use anyOf",
                )
            joined.append({"anyOf": branches})
        if "$ref" in written and (named := place_of(written["$ref"], self.root)) is not None:
            written["$ref"] = self._reference(named)
        return with_parts({**written, "allOf": [*written.get("allOf", []), *joined]} if joined else written)

    def _with_most_items(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with as many items as can differ, where few values are allowed: a model would go on."""
        items = schema.get("items")
        items = target(self.root, items["$ref"]) if isinstance(items, dict) and "$ref" in items else items
        if schema.get("uniqueItems") is not True or not isinstance(items, dict):
            return schema
        values = [items["const"]] if "const" in items else items.get("enum")
        values = [True, False] if values is None and items.get("type") == "boolean" else values
        if not isinstance(values, list):
            return schema
        most = len(values) + len(schema.get("prefixItems", ()))
        return {**schema, "maxItems": min(schema.get("maxItems", most), most)}

    def _reference(self, place: Place) -> str:
        """Return a `$ref` by which llguidance finds a place: names that URIs escape are not read alike."""
        if is_plain(place) and "oneOf" not in place:
            return pointer(place)
        taken = {*self.root.get("$defs", {}), *self.moved.values()}
        free = (name for number in itertools.count() if (name := f"moved{number}") not in taken)
        return pointer(("$defs", self.moved.setdefault(place, next(free))))

    def with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with a definition for each place that is not referred to by its name."""
        definitions = dict(schema.get("$defs", {}))
        while left := [place for place, name in self.moved.items() if name not in definitions]:
            for place in left:
                known = schema.get(place[0], {}) if len(place) == 2 and place[0] in ("$defs", "definitions") else {}
                found = (
                    known[place[1]] if place[1:] and place[1] in known else self.read(at(self.root, place), place, 0)
                )
                definitions[self.moved[place]] = found
        return {**schema, "$defs": definitions} if self.moved else dict(schema)


def _common(multiples: set[Fraction]) -> int:
    """Return the least common multiple, in units of the last decimal of any."""
    unit = max(math.lcm(*(one.denominator for one in multiples)), 1)
    return math.lcm(*(int(one * unit) for one in multiples))


def _may_be_text(schema: dict[str, Any]) -> bool:
    return "string" in json.dumps(schema.get("type", "string"))


def _exact(number: float) -> bool:
    if isinstance(number, int):
        return abs(number) <= LARGEST_NUMBER
    inside = number == 0 or SMALLEST_NUMBER <= abs(number) <= LARGEST_NUMBER
    return inside and float(f"{number:.{MOST_DIGITS}g}") == number


def _check_value(value: Any, place: Place) -> None:
    """Refuse a number or a text that would not come out as it is."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_value(one, place)
    elif isinstance(value, int | float) and not _exact(value):
        raise refusal(
            place, f"{shown(value)} is not exact: use up to {MOST_DIGITS} digits, from 1e-7 to 2**53, or a text"
        )
    elif isinstance(value, str) and any(one < " " and one not in _WRITABLE for one in value):
        raise refusal(place, "control characters other than \\b, \\t, \\n, \\f and \\r cannot be written: remove them")


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
