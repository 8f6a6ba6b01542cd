"""Detection of the prompts in an input: their column and its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from pipeline.errors import InputError
from pipeline.io.listing import InputFile, InputListing
from pipeline.io.reading import read_file
from pipeline.settings import ReadingConfig

_ID_COLUMN = "id"
_LOOK_ROWS = 100
"""Rows at the beginning of the input that decide."""


@dataclass(frozen=True)
class PromptSource:
    """Location of a row's prompt.

    Args:
        kind: The column's content: text, chat messages, or the body of an OpenAI request.
        id_column: The column that names a row; None where the row's file and line do.
        own_sampling: Whether the first rows bring sampling settings of their own.
        ids_found: Whether `id_column` was detected, not configured; see `NoIdsError`.
    """

    column: str
    kind: Literal["text", "messages", "openai"] = "text"
    id_column: str | None = None
    own_sampling: bool = False
    ids_found: bool = False


class NoIdsError(InputError):
    """A detected id column has no ids. Rows are then named by file and line, unless the column was configured."""


BATCH = PromptSource("body", "openai", "custom_id", own_sampling=True)
"""Lines of an OpenAI batch."""


def find_prompts(listing: InputListing, config: ReadingConfig) -> PromptSource:
    """Find the prompts by the first rows.

    Raises:
        InputError: There are no rows, they lack a configured column, or it holds neither text nor messages.
    """
    if config.format == "openai":
        return BATCH
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, _LOOK_ROWS):
            if _is_batch(file, chunk.columns.column_names, config):
                return BATCH
            if len(chunk.problems) == len(chunk.numbers):
                problem = chunk.problems[0]
                raise InputError(f"no row at the start of {file.path} can be read: {problem.message}")
            return _choose_source(file, chunk.columns.schema, config)
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def _is_batch(file: InputFile, columns: list[str], config: ReadingConfig) -> bool:
    unset = config.prompt_column is None and config.messages_column is None and config.id_column is None
    return config.format == "auto" and file.format == "jsonl" and unset and {"custom_id", "url", "body"} <= {*columns}


def _choose_source(file: InputFile, schema: pa.Schema, config: ReadingConfig) -> PromptSource:
    own = config.sampling_column in schema.names
    found = config.id_column is None and _ID_COLUMN in schema.names and _may_be_ids(schema.field(_ID_COLUMN).type)
    ids = _ID_COLUMN if found else config.id_column
    if config.messages_column is not None:
        source = PromptSource(config.messages_column, "messages", ids, own, found)
    elif config.prompt_column is None and "prompt" not in schema.names and "messages" in schema.names:
        source = PromptSource("messages", "messages", ids, own, found)
    else:
        source = PromptSource(config.prompt_column or "prompt", "text", ids, own, found)
    setting = "messages_column" if source.kind == "messages" else "prompt_column"
    for column, name in ((source.column, setting), (source.id_column, "id_column")):
        if column is not None and column not in schema.names:
            raise InputError(
                f"{file.path} has no column {column!r} (it has {', '.join(schema.names)}): set reading.{name}"
            )
    check_types(file, schema, source)
    return source


def check_types(file: InputFile, schema: pa.Schema, source: PromptSource) -> None:
    """Refuse a table whose columns cannot hold prompts or ids; in files of lines, each row is judged alone.

    Raises:
        InputError: A column is missing or of the wrong type.
    """
    if file.format in ("jsonl", "text"):
        return
    for column in filter(None, (source.column, source.id_column)):
        if column not in schema.names:
            problem = f"{file.path} has no column {column!r} (it has {', '.join(schema.names)})"
            raise NoIdsError(problem) if source.ids_found and column == source.id_column else InputError(problem)
    kind = schema.field(source.column).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    messages = source.kind == "messages" and lists
    if not (_is_text(kind) or messages or pa.types.is_null(kind)):
        wanted = "chat messages" if source.kind == "messages" else "text"
        raise InputError(f"column {source.column!r} of {file.path} holds {kind}, not {wanted}")
    if source.id_column is not None and not _may_be_ids(kind := schema.field(source.id_column).type):
        problem = f"column {source.id_column!r} of {file.path} holds {kind}: ids are text or integers"
        raise NoIdsError(problem) if source.ids_found else InputError(problem)


def _may_be_ids(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pa.types.is_integer(kind) or pa.types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or isinstance(kind, pa.JsonType))
