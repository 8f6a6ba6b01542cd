"""The settings `reading.*`: how rows of the input become prompts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pipeline.command_line import at_least
from pipeline.errors import InputError

Format = Literal["jsonl", "parquet", "csv", "text", "arrow"]
"""Formats of input files."""


@dataclass(frozen=True)
class ReadingConfig:
    """How rows become prompts.

    Args:
        format: Format of the input files. `auto` goes by their names (.jsonl, .parquet, .csv, .txt, .arrow; also .gz
            and the like) and recognises JSON lines that are an OpenAI batch; `openai` says that they are one.
        split: Which split of a Hugging Face dataset, such as `train`; by default the only one.
        subset: Which subset of a Hugging Face dataset; by default the only one, or `default`.
        prompt_column: Column of text prompts; by default `prompt`, if `messages_column` is not set either.
        messages_column: Column of chat messages: a list of {role, content}, or that list as JSON text.
        id_column: Column whose value names a row, each value once; by default `id`, where it does so, and otherwise a
            row is named by its file and line.
        sampling_column: Column with a row's own sampling settings: an object, or that object as JSON text.
        chat: Send a text prompt as a user's message through the chat template; by default wherever the model has one.
        date: What the clock shows a chat template that writes the date or the time, as in 2026-03-31 or
            2026-03-31T12:00; by default the time at which the output was begun.
        special_tokens: Let the text of a special token in a chat message be that token; by default it is text.
        skip: Leave out this many rows at the beginning.
        limit: Take at most this many rows.
        samples: Texts to generate for each row, each with its own seed, in rows named `ID#0`, `ID#1`, ….
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text", "arrow", "openai"] = "auto"
    split: str | None = None
    subset: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    sampling_column: str = "sampling"
    chat: bool | None = None
    date: str | None = None
    special_tokens: bool = False
    skip: int = 0
    limit: int | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        if self.prompt_column is not None and self.messages_column is not None:
            raise InputError("reading.prompt_column and reading.messages_column are both set: a row has one prompt")
        if self.date is not None:
            try:
                datetime.fromisoformat(self.date)
            except ValueError:
                raise InputError(f"reading.date must be as 2026-03-31 or 2026-03-31T12:00, not {self.date!r}") from None
        at_least("reading.skip", self.skip, 0)
        at_least("reading.limit", self.limit, 1)
        at_least("reading.samples", self.samples, 1)
