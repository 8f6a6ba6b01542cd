"""A row's own sampling settings and its seed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from pipeline.errors import RowError
from pipeline.staging.samples import SEEDS, hashed_seed, sample_seed

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SEED_COLUMN = "seed"


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
    seed = row.get(_SEED_COLUMN)
    if isinstance(seed, str):  # as in a CSV
        seed = int(seed) if seed.isascii() and seed.isdigit() else seed or None
    own_seed = own.get("seed", seed)
    own["seed"] = row_seed(defaults.seed, request_id) if own_seed is None else own_seed
    try:
        sampling = dataclasses.replace(defaults, **own)
    except (RequestError, TypeError) as error:
        raise RowError("BadSampling", str(error)) from error
    if sampling.seed >= SEEDS:
        raise RowError("BadSampling", f"seed must be less than 2**63, not {sampling.seed}")
    return sampling if own_seed is None else dataclasses.replace(sampling, seed=sample_seed(own_seed, sample))


def _own_settings(value: Any, column: str) -> dict[str, Any]:
    """Read the settings of a row; those that are null are left out."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("BadSampling", f"column {column!r} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise RowError("BadSampling", f"column {column!r} must be an object of sampling settings, not {value!r}")
    own = {name: setting for name, setting in (value or {}).items() if setting is not None}
    if unknown := sorted(own.keys() - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        raise RowError("BadSampling", f"unknown sampling settings {', '.join(unknown)} (there are {known})")
    return own
