"""A row's own sampling settings and its seed."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from drafter.errors import RequestError, shown
from drafter.requests import SamplingParams
from pipeline.errors import RowError
from pipeline.staging.samples import SEED_COLUMN, SEEDS, hashed_seed, sample_seed

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EXACT_FLOATS = 2**53
"""Integers below this are exact as floats; beyond, a float stands for several."""


def row_seed(run_seed: int, request_id: str) -> int:
    """Return a row's seed, below 2⁶³: a stable hash of the run's seed and the row's name alone."""
    return hashed_seed(run_seed, request_id)


def row_sampling(
    defaults: SamplingParams, request_id: str, row: dict[str, Any], column: str, sample: int = 0
) -> SamplingParams:
    """Return a row's settings: the run's, changed by its `seed` column and then by its own settings in `column`.

    Args:
        defaults: The run's settings.
        request_id: The row's name; the seed follows from it where the row brings none.
        row: The row's columns.
        column: The column with the row's own settings.
        sample: Which of the row's texts this is.

    Raises:
        RowError: The row's settings are not an object, have an unknown name, or a value that cannot be used.
    """
    own = _own_settings(row.get(column), column)
    own_seed = own.get("seed", _column_seed(row.get(SEED_COLUMN)))
    own["seed"] = row_seed(defaults.seed, request_id) if own_seed is None else own_seed
    try:
        sampling = dataclasses.replace(defaults, **own)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {shown(sampling.seed)}")
    return sampling if own_seed is None else dataclasses.replace(sampling, seed=sample_seed(own_seed, sample))


def _own_settings(value: Any, column: str) -> dict[str, Any]:
    """Read the settings of a row; those that are null are left out."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("BadSampling", f"column {column!r} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise RowError("BadSampling", f"column {column!r} must be an object of sampling settings, not {shown(value)}")
    own = {name: _plain_setting(setting) for name, setting in (value or {}).items() if setting is not None}
    if unknown := sorted(own.keys() - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        names = ", ".join(shown(name).strip("'") for name in unknown)
        raise RowError("BadSampling", f"unknown sampling settings {names} (there are {known})")
    return own


def _plain_setting(setting: Any) -> Any:
    """Return a setting of a table as JSON has it.

    Entries that are null are keys of another row. A whole number in a column of fractions is an integer.
    """
    if isinstance(setting, dict):
        return {name: value for name, value in setting.items() if value is not None}
    return _integer_if_whole(setting)


def _integer_if_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS else value


def _column_seed(value: Any) -> Any:
    """Return the seed that a column has: in a CSV it is text, and pandas makes integers floats where one is missing."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else value or None
    return _integer_if_whole(value)
