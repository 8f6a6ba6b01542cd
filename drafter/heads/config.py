"""Builds a head's configuration from untrusted values: a checkpoint, a job's file, a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from drafter.errors import LoadError, first_line

Tree = Literal["exact", "static"]
"""Choice of the draft tree: the best one under the head's distributions, or the published fixed one."""


def head_config(name: str, config_class: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass `config_class`. Types must match exactly, but an integer will do for a float.

    Raises:
        LoadError: A field is unknown, missing or has an invalid value.
    """
    try:
        # In strict mode pydantic makes a dataclass of JSON, but not of a dict.
        text = json.dumps(dict(values), default=str, allow_nan=False)
        return TypeAdapter(config_class).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise LoadError(f"draft head {name!r}: {_reason(error)}") from error
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        # Not a number, nested too deep, or of a type that a check of the class does not expect.
        raise LoadError(f"draft head {name!r}: its configuration cannot be read: {first_line(error)}") from error


def _reason(error: ValidationError) -> str:
    """Describe the first invalid field."""
    first = error.errors(include_url=False)[0]
    key = first["loc"][0] if first["loc"] else None
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"unknown configuration key {key!r}; made by a later release?"
        case "missing":
            return f"configuration key {key!r} is missing"
        case "value_error":
            return first_line(first["ctx"]["error"])
    wanted = first["msg"].removeprefix("Input should be ")
    return f"configuration key {key!r} cannot be {first['input']!r}: it must be {wanted}"
