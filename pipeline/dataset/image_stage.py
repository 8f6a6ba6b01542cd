"""The stage before a generating one that makes prompts of messages with images, by tasks beside the engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from drafter.errors import RequestError, one_line
from drafter.images.messages import take_images
from drafter.prompt import Prompt
from pipeline.errors import RowError
from pipeline.generate.row_images import ImageReading, images_of
from pipeline.generate.row_requests import encoder_of, row_conversation
from pipeline.io.prompts import prompt_columns, read_prompts
from pipeline.io.reading import Chunk, UnreadableValueError
from pipeline.settings import TEMPLATE_COLUMNS

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

MESSAGES, IMAGES = "messages", "images"
_PROMPT, _PROBLEM = "__image_prompt__", "__image_problem__"
"""Columns that this stage adds: the prompt of a row with images, and why there is none."""


@dataclass(frozen=True)
class ImageStage:
    """Settings of `add_image_prompts`; `now` is the time that chat templates see."""

    model: str
    trust_remote_code: bool
    reading: ImageReading
    longest: int
    now: datetime


def add_image_prompts(block: pa.Table, stage: ImageStage) -> pa.Table:
    """Return a block with the prompts of rows whose messages have images, or a column `images` beside them."""
    processor = encoder_of(stage.model, stage.trust_remote_code, True).processor
    assert processor is not None
    chunk = Chunk(block, list(range(len(block))))
    columns = {name: chunk.values(name) for name in (MESSAGES, IMAGES, *TEMPLATE_COLUMNS)}
    prompts: list[Prompt | None] = [None] * len(block)
    problems = [""] * len(block)
    for place in range(len(block)):
        row = {name: values[place] for name, values in columns.items()}
        try:
            prompts[place] = _prompt(row, stage, processor)
        except (RowError, RequestError) as error:
            problems[place] = one_line(error)
    made = prompt_columns(prompts, images=True)
    block = block.append_column(_PROMPT, pa.StructArray.from_arrays(list(made.values()), list(made)))
    return block.append_column(_PROBLEM, pa.array(problems, pa.string()))


def _prompt(row: Mapping[str, Any], stage: ImageStage, processor: ImageProcessor) -> Prompt | None:
    """Return the prompt of a row with images; None for one without, and for one that cannot be read."""
    messages, images = row[MESSAGES], row[IMAGES]
    if messages is None or any(isinstance(value, UnreadableValueError) for value in row.values()):
        return None
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            return None
    messages, sources = take_images(messages, images_of(images))
    if not sources:
        return None
    stage.reading.refuse_many(len(sources))
    asked, reading = row_conversation({**row, MESSAGES: messages}, MESSAGES), stage.reading
    how: dict[str, Any] = {"limits": reading.limits, "fetch": reading.fetch}
    return processor.encode(asked, sources, **how, max_length=stage.longest, now=stage.now)


def take_image_prompts(block: pa.Table) -> tuple[pa.Table, list[Prompt | str | None]]:
    """Return a block without what `add_image_prompts` has added, and for rows with images the prompt, or a problem."""
    if _PROMPT not in block.column_names:
        return block, [None] * len(block)
    prompts = read_prompts(pa.Table.from_struct_array(block[_PROMPT]))
    found = [prompt or problem or None for prompt, problem in zip(prompts, block[_PROBLEM].to_pylist(), strict=True)]
    return block.drop_columns([_PROMPT, _PROBLEM]), found
