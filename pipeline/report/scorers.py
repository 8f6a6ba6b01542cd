"""Scores answers: by a built-in rule against a column of the input, or by the user's own function."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafter.errors import one_line, shown
from pipeline.errors import InputError

Scorer = Callable[[Mapping[str, Any]], float]  # a finished row, with all of its columns → its utility, mostly 0 or 1

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")  # JSON writes 0.00001 as 1e-05


def last_number(text: str) -> float | None:
    """Return the last number in a text, in which commas may separate thousands."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _same_number(text: str, target: str) -> bool:
    said = last_number(text)
    return said is not None and said == last_number(target)


def _same_json(text: str, target: str) -> bool:
    try:
        return _same_value(json.loads(text), json.loads(target))
    except (ValueError, RecursionError):  # nested too deeply is no answer either
        return False


def _same_value(one: Any, other: Any) -> bool:
    # As JSON has it: 1 and 1.0 are one number, which true is not, though Python says so.
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


_BUILT_IN: dict[str, Callable[[str, str], bool]] = {
    "number": _same_number,
    "string": lambda text, target: text.strip() == target.strip(),
    "json": _same_json,
}
"""Rules by name: (text, target) → whether the text is right."""


def make_scorer(name: str, target: str | None) -> Scorer:
    """Return a scorer, or raise `InputError` if there is none, or it has no target.

    `number` compares the last numbers of text and target, `string` both except for surrounding space, `json` their
    values; these need `target`, the column with the right answer. `FILE.py:function` is given a row.
    """
    if name in _BUILT_IN:
        if target is None:
            raise InputError(f"the scorer {name} compares with a column of the rows: name it with --target")
        rule, column = _BUILT_IN[name], target
        return lambda row: float(rule(row["text"], _text_of(row, column)))
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        raise InputError(f"no scorer {name!r}: use {', '.join(_BUILT_IN)}, or FILE.py:function")
    return _checked(_load(Path(file), function), name)


def _text_of(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise InputError(f"row {row['request_id']} has no column {column!r} to compare with: set --target")
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _load(file: Path, function: str) -> Callable[[dict[str, Any]], object]:
    # Dataclasses look their module up by its name, which must be unique.
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{uuid.uuid4().hex}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(f"scorer {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        del sys.modules[spec.name]
        raise InputError(f"scorer {file} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"scorer {file} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def _checked(function: Callable[[dict[str, Any]], object], name: str) -> Scorer:
    def score(row: Mapping[str, Any]) -> float:
        try:
            value = function(dict(row))
        except Exception as error:  # whatever the user's function does
            why = f"{type(error).__name__}: {one_line(error)}"
            raise InputError(f"scorer {name} failed on row {row['request_id']}: {why}") from error
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise InputError(f"scorer {name} must return a finite number, not {shown(value)}, row {row['request_id']}")
        return float(value)

    return score
