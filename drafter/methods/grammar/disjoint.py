"""Shows that no value can be in two schemas, so that `oneOf` means the same as `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

from drafter.methods.grammar.places import target

_MOST_COMPARISONS = 20_000
_MOST_PARTS = 8
_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def disjoint(branches: Sequence[Any], root: Any) -> bool:
    """Return whether no two of these schemas, whose `$ref`s lead into `root`, can be seen to share a value.

    It is seen by types, by `const` and `enum`, or by these of a property that both require. False may also mean that
    it cannot be seen, or not by a bounded number of comparisons.
    """
    comparison = _Comparison(root)
    return all(comparison.apart(one, other) for one, other in combinations(branches, 2))


@dataclass
class _Comparison:
    root: Any
    left: int = _MOST_COMPARISONS

    def apart(self, one: Any, other: Any) -> bool:
        parts = (list(islice(self._parts(each, _MOST_PARTS), _MOST_PARTS)) for each in (one, other))
        return any(self._contradict(a, b) for a, b in product(*parts))

    def _parts(self, schema: Any, most: int) -> Iterator[dict[str, Any]]:
        """Yield a schema, and those that hold at the same place by `$ref` and `allOf`, as far as `most` steps."""
        if isinstance(schema, dict):
            yield schema
            if most:
                yield from self._parts(target(self.root, schema.get("$ref")), most - 1)
                for one in _listed(schema, "allOf"):
                    yield from self._parts(one, most - 1)

    def _contradict(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        self.left -= 1
        if self.left < 0:
            return False
        types, values = (_types(one), _types(other)), (_values(one), _values(other))
        if any(each[0] and each[1] and not each[0] & each[1] for each in (types, values)):
            return True
        if {"object"} not in types:  # what is no object has no properties, and could be in both
            return False
        required = [name for name in _listed(one, "required") if name in _listed(other, "required")]
        ours, theirs = one.get("properties", {}), other.get("properties", {})
        return any(self.apart(ours[name], theirs[name]) for name in required if name in ours and name in theirs)


def _listed(schema: dict[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := schema.get(name), list) else []


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows, with integers as numbers; empty if it does not say."""
    named = [schema["type"]] if isinstance(schema.get("type"), str) else _listed(schema, "type")
    if named:
        return {"number" if one == "integer" else str(one) for one in named}
    return {_TYPES[type(one)] for one in _constants(schema)}


def _values(schema: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the values that a schema allows, such that equal ones are equal; empty if it does not list them."""
    if any(isinstance(one, list | dict) for one in _constants(schema)):
        return set()
    return {(_TYPES[type(one)], json.dumps(float(one) if type(one) is int else one)) for one in _constants(schema)}


def _constants(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _listed(schema, "enum")
