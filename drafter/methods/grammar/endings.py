"""What is checked of a record when it has ended: keywords that no grammar can follow.

That items differ, and that a decimal fraction divides a float, cannot be seen before. All else a grammar has seen to;
here it only tells the branches of `anyOf` apart, by types, constants and required properties.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from drafter.methods.grammar.formats import FORMATS
from drafter.methods.grammar.places import at, places, target

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


def ending(schema: Any) -> Callable[[str], bool] | None:
    """Return what tells of a JSON text whether it is valid by all that is checked at its end; None for nothing."""
    return _Ending(schema).holds if any(checks_at_end(at(schema, one)) for one in places(schema)) else None


def annotating(schema: Any) -> set[str]:
    """Return the formats of a schema that say nothing of a text."""
    found = (at(schema, one) for one in places(schema))
    return {str(one["format"]) for one in found if isinstance(one, dict) and "format" in one} - FORMATS.keys()


def _is_dyadic(multiple: Fraction) -> bool:
    """Return whether division by a number is exact in binary, so that validators find all its multiples."""
    return multiple.denominator & (multiple.denominator - 1) == 0


@dataclass(frozen=True)
class _Ending:
    root: Any

    def holds(self, text: str) -> bool:
        try:
            return self._fits(self.root, json.loads(text))
        except (ValueError, RecursionError):
            return False

    def _fits(self, schema: Any, value: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and not self._fits(target(self.root, schema["$ref"]), value):
            return False
        return (
            _of_type(schema, value)
            and all(self._fits(one, value) for one in schema.get("allOf", ()))
            and all(
                any(self._fits(one, value) for one in schema[name]) for name in ("anyOf", "oneOf") if name in schema
            )
            and self._parts_fit(schema, value)
        )

    def _parts_fit(self, schema: dict[str, Any], value: Any) -> bool:
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            rest = [schema.get("items", True)] * max(0, len(value) - len(first))
            distinct = schema.get("uniqueItems") is not True or len({_key(one) for one in value}) == len(value)
            return distinct and all(map(self._fits, [*first, *rest], value))
        if isinstance(value, dict):
            named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            others = True if "patternProperties" in schema else others
            return all(name in value for name in schema.get("required", ())) and all(
                self._fits(named.get(name, others), one) for name, one in value.items()
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
