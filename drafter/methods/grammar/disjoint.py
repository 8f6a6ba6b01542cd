"""Shows that no value can be in two schemas, so that `oneOf` means the same as `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

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

    False may also mean that it cannot be seen: by types, by `const` and `enum`, or by these of a required property.
    """
    parts = [list(_parts(one, root, _MOST_PARTS)) for one in branches]
    return all(_apart(one, other, root, _MOST_PARTS) for one, other in combinations(parts, 2))


def _apart(one: list[dict[str, Any]], other: list[dict[str, Any]], root: Any, depth: int) -> bool:
    return any(_contradict(a, b, root, depth) for a, b in product(one, other))


def _parts(schema: Any, root: Any, most: int) -> Iterator[dict[str, Any]]:
    """Yield a schema, and those that hold at the same place by `$ref` and `allOf`, as far as `most` steps."""
    if isinstance(schema, dict):
        yield schema
        inner = [*schema.get("allOf", [])[:most]]
        if "$ref" in schema:
            inner.append(_at(root, schema["$ref"]))
        if most:
            for one in inner:
                yield from _parts(one, root, most // 2)


def _at(root: Any, reference: str) -> Any:
    found = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(part)
        else:
            found = (
                found[int(part)] if isinstance(found, list) and part.isdecimal() and int(part) < len(found) else None
            )
    return found


def _contradict(one: dict[str, Any], other: dict[str, Any], root: Any, depth: int) -> bool:
    types = _types(one), _types(other)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = _values(one), _values(other)
    if values[0] and values[1] and not values[0] & values[1]:
        return True
    if {"object"} not in types or not depth:
        return False
    shared = [name for name in one.get("required", []) if name in other.get("required", [])]
    depth //= 2
    properties = one.get("properties", {}), other.get("properties", {})
    pairs = [[list(_parts(each[name], root, depth)) for each in properties if name in each] for name in shared]
    return any(len(pair) == 2 and _apart(pair[0], pair[1], root, depth) for pair in pairs)


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows, with integers as numbers; empty if it does not say."""
    named = schema.get("type", [])
    if not named and ("const" in schema or "enum" in schema):
        return {_TYPES[type(one)] for one in schema.get("enum", [schema.get("const")])}
    return {"number" if one == "integer" else one for one in ([named] if isinstance(named, str) else named)}


def _values(schema: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the values that a schema allows, such that equal ones are equal; empty if it does not list them."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if any(isinstance(one, list | dict) for one in listed):
        return set()
    return {(_TYPES[type(one)], json.dumps(float(one) if type(one) is int else one)) for one in listed}
