"""Dataclasses made of JSON's values, whose types must match exactly; an integer will do for a float."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drafter.errors import shown

_WORDS = {
    int: "a valid integer",
    float: "a valid number",
    bool: "a valid boolean",
    str: "a valid string",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
}


class FieldError(ValueError):
    """A value is of another type than its field, or a field is missing or unknown; `path` has the keys to it."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.path = path


def from_json(kind: Any, value: Any, *, others: bool = False, path: tuple[str, ...] = ()) -> Any:
    """Return `value`, as `json.loads` gives it, as a `kind`: a dataclass, or a type that a field of one can have.

    With `others`, keys that a dataclass does not have are passed over.

    Raises:
        FieldError: A value has another type, or a key is missing or unknown. The message says which.
        ValueError: What the dataclass itself refuses.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _instance(kind, value, others, path)
    if origin in (Union, UnionType):
        for one in inner:
            with suppress(FieldError):
                return from_json(one, value, others=others, path=path)
    elif origin is Literal:
        if any(type(value) is type(one) and value == one for one in inner):
            return value
    elif origin is float and type(value) is int:
        return float(value)
    elif inner and origin is dict and isinstance(value, dict):
        return {key: from_json(inner[1], one, others=others, path=(*path, key)) for key, one in value.items()}
    elif inner and origin in (list, tuple) and isinstance(value, list):
        return origin(from_json(inner[0], one, others=others, path=path) for one in value)
    elif origin is type(value):
        return value
    raise _wrong(kind, value, path)


def _instance(kind: Any, value: Any, others: bool, path: tuple[str, ...]) -> Any:
    if not isinstance(value, dict):
        raise _wrong(dict, value, path)
    hints, known = get_type_hints(kind), {one.name: one for one in fields(kind) if one.init}
    for key in value.keys() - known.keys() if not others else ():
        close = get_close_matches(str(key), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"made by a later release? There are {', '.join(known)}"
        raise FieldError((*path, key), f"unknown configuration key {key!r}; {hint}")
    made = {}
    for name, one in known.items():
        if name in value:
            made[name] = from_json(hints[name], value[name], others=others, path=(*path, name))
        elif one.default is MISSING and one.default_factory is MISSING:
            raise FieldError((*path, name), f"configuration key {name!r} is missing")
    return kind(**made)


def _wrong(kind: Any, value: object, path: tuple[str, ...]) -> FieldError:
    key = path[-1] if path else None
    return FieldError(path, f"configuration key {key!r} cannot be {shown(value)}: it must be {_words(kind)}")


def _words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin not in (Literal, Union, UnionType):
        return _WORDS.get(origin, "an object")
    *most, last = map(repr if origin is Literal else _words, get_args(kind))
    return f"{', '.join(most)} or {last}" if most else last
