"""What `datasets` and pandas note in a schema about its columns, such as the names of classes or which is the index.

A schema's notes become metadata of its fields, which go with them through all stages; the output's schema gets those
that are left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

_DATASETS, _PANDAS = b"huggingface", b"pandas"


def with_column_notes(table: pa.Table) -> pa.Table:
    """Return a table whose fields have the schema's notes about them as their metadata."""
    schema = table.schema
    notes: dict[str, dict[bytes, bytes]] = {name: {} for name in schema.names}
    features = _read(schema, _DATASETS, "info", "features")
    for name, feature in features.items() if isinstance(features, dict) else ():
        if name in notes:
            notes[name][_DATASETS] = json.dumps(feature).encode()
    columns, index = _read(schema, _PANDAS, "columns"), _read(schema, _PANDAS, "index_columns")
    levels = index if isinstance(index, list) else []
    for column in columns if isinstance(columns, list) else ():
        name = (column.get("field_name") or column.get("name")) if isinstance(column, dict) else None
        if isinstance(name, str) and name in notes:  # a range is an index without a column
            level = levels.index(name) if name in levels else None
            notes[name][_PANDAS] = json.dumps({"column": column, "level": level}).encode()
    return pa.Table.from_arrays(table.columns, schema=pa.schema([one.with_metadata(notes[one.name]) for one in schema]))


def _read(schema: pa.Schema, key: bytes, *path: str) -> Any:
    try:
        found = json.loads((schema.metadata or {})[key])
        for name in path:
            found = found[name]
    except (KeyError, TypeError, ValueError):  # nothing is noted, or what somebody else means by this key
        return None
    return found


def with_schema_notes(table: pa.Table, fields: Iterable[pa.Field]) -> pa.Table:
    """Return a table whose schema has the notes that some of its `fields` have as their metadata."""
    features: dict[str, Any] = {}
    columns: list[dict[str, Any]] = []
    levels: list[tuple[int, str]] = []
    for field in fields:
        notes = field.metadata or {}
        if _DATASETS in notes:
            features[field.name] = json.loads(notes[_DATASETS])
        if _PANDAS in notes:
            note = json.loads(notes[_PANDAS])
            named = note["column"].get("name") is not None and note["level"] is None
            columns.append(note["column"] | {"field_name": field.name} | ({"name": field.name} if named else {}))
            levels += [] if note["level"] is None else [(note["level"], field.name)]
    found: dict[bytes, Any] = {}
    if features:
        found[_DATASETS] = {"info": {"features": features}}
    if columns:
        index = [name for _, name in sorted(levels)]
        found[_PANDAS] = {"index_columns": index, "column_indexes": [], "columns": columns, "pandas_version": None}
    return table.replace_schema_metadata({key: json.dumps(value) for key, value in found.items()} or None)
