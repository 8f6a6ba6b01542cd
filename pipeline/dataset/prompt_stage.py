"""Prompts of a dataset's rows, as a job makes them; for a target model that sees, by tasks beside the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from drafter.errors import RequestError, one_line, shown
from drafter.many import is_tokens, plain
from drafter.prompt import Prompt
from drafter.text.tokenizers import refuse_half_characters
from pipeline.errors import RowError
from pipeline.generate.row_images import IMAGES, images_of, row_sources
from pipeline.generate.row_requests import Encoder, PromptSettings, Rendered, encoder_of, row_prompt
from pipeline.generate.row_requests import read_prompts as in_tokens
from pipeline.io.listing import PromptSource
from pipeline.io.prompts import prompt_columns, read_prompts
from pipeline.io.reading import Chunk, UnreadableValueError
from pipeline.settings import TEMPLATE_COLUMNS

MESSAGES, TEXT, IDS = "messages", "prompt", "prompt_token_ids"
PROMPTS = (MESSAGES, TEXT, IDS)
"""Columns that have a row's prompt; the first that there is counts."""
_PROMPT, _PROBLEM = "__prompt__", "__prompt_problem__"
"""Columns that `add_prompts` adds: the prompt of a row, and why there is none."""
Made = Sequence[Prompt | str]
"""The prompt of each row, or what is wrong with it."""


def prompt_kind(block: pa.Table) -> str | None:
    """Return the column that has the prompts of a block; None if there is none."""
    return next((name for name in PROMPTS if name in block.column_names), None)


def make_prompts(block: pa.Table, settings: PromptSettings, encoder: Encoder) -> Made:
    """Return the prompts of a block with a column of them. Images are in messages, or in a column `images`."""
    kind = prompt_kind(block)
    assert kind is not None
    settings = replace(settings, source=PromptSource(kind, "messages" if kind == MESSAGES else "text"))
    chunk = Chunk(block, list(range(len(block))))
    columns = {name: chunk.values(name) for name in (kind, IMAGES, *TEMPLATE_COLUMNS)}
    made: list[Prompt | str] = [""] * len(block)
    written: dict[int, Rendered] = {}
    for place in range(len(block)):
        try:
            row = {name: values[place] for name, values in columns.items()}
            written[place] = _written(row, settings, encoder)
        except (RowError, RequestError) as error:
            made[place] = one_line(error)
    for place, found in in_tokens(written, settings, encoder.tokenizer):
        made[place] = one_line(found) if isinstance(found, RowError) else found
    return made


def prompt_of(asked: Mapping[str, Any], settings: PromptSettings, encoder: Encoder) -> Prompt:
    """Return the prompt of one call: `prompt` are messages, token ids or a text, beside it are `images` and the like.

    Raises:
        RowError: There is none, or it cannot be read.
        RequestError: The same, of its images.
    """
    prompt = plain(asked[TEXT])
    kind = IDS if is_tokens(prompt) else MESSAGES if isinstance(prompt, list) else TEXT
    source = PromptSource(kind, "messages" if kind == MESSAGES else "text")
    settings = replace(settings, source=source)
    written = _written({**asked, kind: prompt}, settings, encoder)
    ((_, found),) = in_tokens({0: written}, settings, encoder.tokenizer)
    if isinstance(found, RowError):
        raise found
    return found


def _written(row: dict[str, Any], settings: PromptSettings, encoder: Encoder) -> Rendered:
    for name, value in row.items():
        if isinstance(value, UnreadableValueError):
            raise RowError("BadPrompt", f"column {name!r} cannot be read: {value}")
    refuse_half_characters({name: value for name, value in row.items() if name != IMAGES})
    images, kind = images_of(row.pop(IMAGES)), settings.source.column
    if kind == IDS:
        return _token_ids(row, images)
    if encoder.processor is not None:
        assert settings.images is not None
        images = row_sources(row, settings.source, images)
        settings.images.refuse_many(len(images))
    return row_prompt(row, [(one, None) for one in images], settings, encoder)


def _token_ids(row: Mapping[str, Any], images: Sequence[Any]) -> list[int]:
    ids = row[IDS]
    if ids is None:
        raise RowError("BadPrompt", f"column {IDS!r} is empty")
    if images:
        raise RowError("BadPrompt", f"column {IDS!r} has no places for images: give {MESSAGES} or a {TEXT}")
    if not is_tokens(ids):
        raise RowError("BadPrompt", f"column {IDS!r} must be a list of token ids, not {shown(ids)}")
    return [int(token) for token in ids]


def add_prompts(block: pa.Table, settings: PromptSettings) -> pa.Table:
    """Return a block with its prompts, if it has a column of them."""
    if prompt_kind(block) is None:
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
