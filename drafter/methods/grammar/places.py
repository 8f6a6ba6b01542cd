"""The places of a schema that are schemas themselves, and `$ref`s to them, in any spelling of RFC 6901 and of URIs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

Place = tuple[str, ...]

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = ("items", "additionalProperties")

_PLAIN = re.compile(r"[\w.$-]*", re.ASCII)


def mapped(schema: Mapping[str, Any], change: Callable[[Place, Any], Any]) -> dict[str, Any]:
    """Return a schema with `change` of each schema directly inside it; it gets the way there, too."""
    changed = dict(schema)
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            changed[name] = {key: change((name, key), inner) for key, inner in value.items()}
        elif name in LISTS and isinstance(value, list):
            changed[name] = [change((name, str(index)), inner) for index, inner in enumerate(value)]
        elif name in SINGLES:
            changed[name] = change((name,), value)
    return changed


def places(schema: Any, place: Place = ()) -> list[Place]:
    """Return where a schema has schemas, each before those inside it."""
    found = [place]
    if isinstance(schema, dict):
        mapped(schema, lambda tail, inner: found.extend(places(inner, (*place, *tail))))
    return found


def pointer(place: Place) -> str:
    return "#" + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in place)


def place_of(reference: str, root: Any) -> Place | None:
    """Return the place in `root` that a `$ref` names; None if there is none.

    Percent signs are decoded, as in a URI; a name that has them itself is found, too.
    """
    if not reference.startswith("#"):
        return None
    for text in (unquote(reference[1:]), reference[1:]):
        if text and not text.startswith("/"):
            continue
        place = tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])
        if at(root, place) is not None:
            return place
    return None


def at(root: Any, place: Place) -> Any:
    found = root
    for part in place:
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def existing(place: Place, root: Any) -> Place:
    """Return as much of a place as `root` has."""
    return next(place[:end] for end in range(len(place), -1, -1) if at(root, place[:end]) is not None)


def target(root: Any, reference: Any) -> Any:
    """Return the schema that a `$ref` names; None if there is none."""
    place = place_of(reference, root) if isinstance(reference, str) else None
    return None if place is None else at(root, place)


def is_plain(place: Place) -> bool:
    """Return whether llguidance finds a place by its pointer: its names have nothing that URIs escape."""
    return all(_PLAIN.fullmatch(part.replace("/", "").replace("~", "")) for part in place)
