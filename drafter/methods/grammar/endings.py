"""What is checked of a record when it has ended: keywords that no grammar can follow.

That items differ, and that a decimal fraction divides a float, cannot be seen before. All else a grammar has seen to;
here it only tells the branches of `anyOf` apart, by types, constants and required properties, as `disjoint` does. Each
value meets each part of a schema once, and only parts that lead to what is checked: an engine's thread waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from drafter.methods.grammar.formats import FORMATS
from drafter.methods.grammar.places import Place, at, place_of, places, target

_OF_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def checks_at_end(schema: Any) -> bool:
    """Return whether a schema has, at its own place, what is checked when a record has ended."""
    return isinstance(schema, dict) and (
        schema.get("uniqueItems") is True
        or ("multipleOf" in schema and not _is_dyadic(Fraction(str(schema["multipleOf"]))))
    )


def leading_to_late(root: Any) -> set[Place]:
    """Return the places at or below which, or where they refer to, something is checked when a record has ended."""
    all_places = places(root)
    left = [place for place in all_places if checks_at_end(at(root, place))]
    referring: dict[Place | None, list[Place]] = {}
    for place in all_places if left else ():
        schema = at(root, place)
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            referring.setdefault(place_of(reference, root), []).append(place)
    found = set[Place]()
    while left:
        place = left.pop()
        new = {place[:end] for end in range(len(place) + 1)} - found
        found |= new
        left += [one for named in new for one in referring.get(named, ())]
    return found


def ending(schema: Any) -> Callable[[str], bool] | None:
    """Return what tells of a JSON text whether it is valid by all that is checked at its end; None for nothing."""
    late = frozenset(id(at(schema, place)) for place in leading_to_late(schema))

    def holds(text: str) -> bool:
        try:
            return _Ending(schema, late).fits(schema, json.loads(text))
        except (ValueError, RecursionError):
            return False

    return holds if late else None


def annotating(schema: Any) -> set[str]:
    """Return the formats of a schema that say nothing of a text."""
    found = (at(schema, one) for one in places(schema))
    return {str(one["format"]) for one in found if isinstance(one, dict) and "format" in one} - FORMATS.keys()


def _is_dyadic(multiple: Fraction) -> bool:
    """Return whether division by a number is exact in binary, so that validators find all its multiples."""
    return multiple.denominator & (multiple.denominator - 1) == 0


@dataclass(frozen=True)
class _Ending:
    """Compares one value with a schema.

    Args:
        late: The parts of the schema that lead to what is checked, by `id`.
        known: What has been found of a part and a value.
    """

    root: Any
    late: frozenset[int]
    known: dict[tuple[int, int, bool], bool] = field(default_factory=dict)

    def fits(self, schema: Any, value: Any, telling: bool = False) -> bool:
        """Return whether what is checked holds of a value; if `telling`, also what tells its branch from others."""
        if not isinstance(schema, dict):
            return schema is not False
        if not telling and id(schema) not in self.late:
            return True
        key = id(schema), id(value), telling
        if key not in self.known:
            self.known[key] = self._fits(schema, value, telling)
        return self.known[key]

    def _fits(self, schema: dict[str, Any], value: Any, telling: bool) -> bool:
        if "$ref" in schema and not self.fits(target(self.root, schema["$ref"]), value, telling):
            return False
        return (
            _of_type(schema, value)
            and all(self.fits(one, value, telling) for one in schema.get("allOf", ()))
            and all(
                any(self.fits(one, value, True) for one in schema[name])
                for name in ("anyOf", "oneOf")
                if name in schema and id(schema) in self.late
            )
            and self._parts_fit(schema, value, telling)
        )

    def _parts_fit(self, schema: dict[str, Any], value: Any, telling: bool) -> bool:
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            rest = [schema.get("items", True)] * max(0, len(value) - len(first))
            distinct = schema.get("uniqueItems") is not True or len({_key(one) for one in value}) == len(value)
            return distinct and all(map(self.fits, [*first, *rest], value))
        if isinstance(value, dict):
            named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            others = True if "patternProperties" in schema else others
            required = set(schema.get("required", ()))
            return required <= value.keys() and all(
                self.fits(named.get(name, others), one, telling and name in required) for name, one in value.items()
            )
        if "multipleOf" in schema and type(value) in (int, float) and checks_at_end(schema):
            return bool((value / schema["multipleOf"]).is_integer())
        return True


def _of_type(schema: dict[str, Any], value: Any) -> bool:
    types = schema.get("type", list(_OF_TYPES))
    allowed = [one for name in ([types] if isinstance(types, str) else types) for one in _OF_TYPES.get(name, ())]
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    return type(value) in allowed and (constants is None or _key(value) in map(_key, constants))


def _key(value: Any) -> Any:
    """Return what is equal for equal JSON values alone, and can be hashed."""
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, _key(one)) for name, one in value.items()))
    return (isinstance(value, bool), value)
