"""Latency tables in the cache folder, so that an engine which has been here before need not measure again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.budget.latency_table import LatencyTable
from drafter.native.build import cache_folder

logger = logging.getLogger(__name__)


def load_costs(subject: Mapping[str, Any]) -> list[LatencyTable] | None:
    """Return the tables kept for a subject, which is all that step times follow from; None if there are none."""
    try:
        record = json.loads(_file(subject).read_text(encoding="utf-8"))
        if record["subject"] != _as_json(subject):
            return None
        return [_table(one) for one in record["tables"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:  # a damaged file is measured anew
        logger.debug("kept step times cannot be read: %s", error)
        return None


def save_costs(subject: Mapping[str, Any], tables: Sequence[LatencyTable]) -> None:
    """Keep tables for a subject; where the cache folder cannot be written to, the next start measures again."""
    file = _file(subject)
    record = {"subject": _as_json(subject), "tables": _as_json([dataclasses.asdict(one) for one in tables])}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            made.write_text(json.dumps(record), encoding="utf-8")
            os.replace(made, file)  # engines that start together may all write
    except OSError as error:
        logger.debug("step times cannot be kept: %s", error)


def _file(subject: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(_as_json(subject), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json"


def _as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value, default=lambda one: one.tolist() if isinstance(one, np.ndarray) else str(one)))


def _table(record: dict[str, Any]) -> LatencyTable:
    arrays = {
        name: None if record[name] is None else np.array(record[name], dtype=np.float64)
        for name in ("batches", "verify", "draft", "longer", "choices")
    }
    choosing = {way: np.array(seconds, dtype=np.float64) for way, seconds in record["choosing"].items()}
    return LatencyTable(**{**record, **arrays, "nodes": tuple(record["nodes"]), "choosing": choosing})
