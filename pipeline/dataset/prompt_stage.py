"""Prompts of a dataset's rows, as a job makes them; for a target model that sees, by tasks beside the engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from drafter.errors import RequestError, one_line
from drafter.prompt import Prompt
from pipeline.errors import RowError
from pipeline.generate.prompts import PROMPTS, Encoder, PromptSettings, Written, encoder_of, of_kind, written_call
from pipeline.generate.prompts import read_prompts as in_tokens
from pipeline.generate.row_images import IMAGES
from pipeline.io.prompts import prompt_columns, read_prompts
from pipeline.io.reading import Chunk
from pipeline.settings import TEMPLATE_COLUMNS

_PROMPT, _PROBLEM = "__prompt__", "__prompt_problem__"
"""Columns that `add_prompts` adds: the prompt of a row, and why there is none."""
Made = Sequence[Prompt | str]
"""The prompt of each row, or what is wrong with it."""


def prompt_kind(columns: Sequence[str]) -> str | None:
    """Return which of a table's columns has the prompts; None if there is none."""
    return next((name for name in PROMPTS if name in columns), None)


def row_of(columns: Mapping[str, Sequence[Any]], place: int) -> dict[str, Any]:
    """Return a row of some columns, with None for NaN: in a dataset of pandas, a row that has no value has that."""
    row = {name: values[place] for name, values in columns.items()}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def make_prompts(block: pa.Table, settings: PromptSettings, encoder: Encoder) -> Made:
    """Return the prompts of a block with a column of them. Images are in messages, or in a column `images`."""
    kind = prompt_kind(block.column_names)
    assert kind is not None
    settings = of_kind(settings, kind)
    chunk = Chunk(block, list(range(len(block))))
    columns = {name: chunk.values(name) for name in (kind, IMAGES, *TEMPLATE_COLUMNS)}
    made: list[Prompt | str] = [""] * len(block)
    written: dict[int, Written] = {}
    for place in range(len(block)):
        try:
            written[place] = written_call(row_of(columns, place), settings, encoder)
        except (RowError, RequestError) as error:
            made[place] = one_line(error)
    for place, found in in_tokens(written, settings, encoder):
        made[place] = one_line(found) if isinstance(found, RowError) else found
    return made


def add_prompts(block: pa.Table, settings: PromptSettings) -> pa.Table:
    """Return a block with its prompts, if it has a column of them."""
    if prompt_kind(block.column_names) is None:
        return block
    made = make_prompts(block, settings, encoder_of(settings.tokenizer, settings.trust_remote_code, True))
    prompts = prompt_columns([None if isinstance(one, str) else one for one in made], images=True)
    block = block.append_column(_PROMPT, pa.StructArray.from_arrays(list(prompts.values()), list(prompts)))
    return block.append_column(_PROBLEM, pa.array([one if isinstance(one, str) else "" for one in made], pa.string()))


def take_prompts(block: pa.Table) -> tuple[pa.Table, Made | None]:
    """Return a block without what `add_prompts` has added, and that; None if it has added nothing."""
    if _PROMPT not in block.column_names:
        return block, None
    prompts = read_prompts(pa.Table.from_struct_array(block[_PROMPT]))
    made = [one or problem for one, problem in zip(prompts, block[_PROBLEM].to_pylist(), strict=True)]
    return block.drop_columns([_PROMPT, _PROBLEM]), made
