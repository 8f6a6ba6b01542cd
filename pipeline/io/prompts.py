"""Prompts as columns of a table, with the arrays of their images, from tasks with a processor to engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from drafter.prompt import Prompt, Span

PROMPT_COLUMNS = ("prompt_ids", "spans", "inputs")
_SPANS = pa.list_(pa.struct([("start", pa.int32()), ("stop", pa.int32()), ("digest", pa.binary())]))
_ARRAY = [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
_INPUTS = pa.list_(pa.struct(_ARRAY))


def prompt_columns(prompts: Iterable[Prompt | None], *, images: bool) -> dict[str, pa.Array]:
    """Return `PROMPT_COLUMNS` of some rows, null where there is no prompt; where none has images, the first alone."""
    held = list(prompts)
    ids = pa.array([None if one is None else one.ids for one in held], pa.list_(pa.int32()))
    if not images:
        return {"prompt_ids": ids}
    spans = [None if one is None else [vars(span) for span in one.spans] for one in held]
    inputs = [None if one is None else _arrays(one) for one in held]
    return {"prompt_ids": ids, "spans": pa.array(spans, _SPANS), "inputs": pa.array(inputs, _INPUTS)}


def _arrays(prompt: Prompt) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": values.dtype.str, "shape": values.shape, "data": np.ascontiguousarray(values).data}
        for name, values in prompt.inputs.items()
    ]


def read_prompts(rows: pa.Table) -> list[Prompt | None]:
    """Return the prompts of `prompt_columns`. Their arrays are read-only views of the table's memory."""
    ids = rows["prompt_ids"].to_pylist()
    if "spans" not in rows.column_names:
        return [None if one is None else Prompt(one) for one in ids]
    spans = [tuple(Span(**span) for span in some or ()) for some in rows["spans"].to_pylist()]
    columns = zip(ids, spans, map(_inputs, rows["inputs"]), strict=True)
    return [None if one is None else Prompt.of_images(one, places, inputs) for one, places, inputs in columns]


def _inputs(inputs: pa.ListScalar) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for one in inputs.values or ():
        values = np.frombuffer(one["data"].as_buffer(), np.dtype(one["dtype"].as_py()))
        found[one["name"].as_py()] = values.reshape(one["shape"].as_py())
    return found
