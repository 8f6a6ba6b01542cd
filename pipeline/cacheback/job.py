"""Counts the n-grams of a corpus of texts, chats or token ids into a table; the file appears as a whole."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pyarrow import fs

from drafter.errors import LoadError, RequestError, one_line
from drafter.methods.cacheback.frozen_table import NgramCounts, Vocabulary, read_metadata, table_bytes
from drafter.source_commit import source_commit
from drafter.text.chat import Chat, encode_chats, render_chat
from pipeline.cacheback.config import CacheConfig
from pipeline.engines.models import model_fingerprint, model_name
from pipeline.errors import InputError, RowError
from pipeline.generate.row_requests import row_conversation
from pipeline.io.files import Location, locate
from pipeline.io.listing import InputListing, input_fingerprints, list_input, read_apart
from pipeline.io.reading import read_file
from pipeline.output.folder import OutputFolder, read_run, versions

_ROWS = 512  # rows that are tokenised together
_NGRAMS = 1 << 22  # different n-grams that are counted at once; they take a few hundred MiB
_LINE_SECONDS = 10.0

Kind = Literal["text", "messages", "tokens"]
_USUAL: dict[str, Kind] = {"text": "text", "prompt": "text", "messages": "messages", "token_ids": "tokens"}
"""Columns to look for where none is named."""


def make_table(config: CacheConfig) -> None:
    """Count the n-grams of a corpus and write the table.

    Raises `InputError` if the corpus or the tokeniser cannot be used, or the output is something else.
    """
    corpus = open_corpus(config)
    meaning = {
        "input": input_fingerprints(corpus.listing),
        "reading": asdict(config.reading),
        "column": corpus.column,
        "leaders": config.leaders,
        "followers": config.followers,
    }
    output = locate(config.output)
    if output.type == fs.FileType.Directory:
        raise InputError(f"output {config.output} is a folder: name a file for the table")
    # Torch takes seconds to import: check the rest first.
    from drafter.text.tokenizers import load_tokenizer, vocabulary_digest

    try:
        tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
    vocabulary = Vocabulary(vocabulary_digest(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    meaning["vocabulary"] = vocabulary.digest
    if is_made(output, meaning):
        print(f"written:  {output.path} (it was there)", flush=True)
        return
    try:
        Path(output.path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {config.output} cannot be written to: {one_line(error)}") from error
    write_table(config, corpus, output, tokenizer, vocabulary, meaning)


def is_made(output: Location, meaning: dict[str, Any]) -> bool:
    """Return whether an earlier submission has made this table; raise `InputError` if the file is another."""
    if output.type == fs.FileType.NotFound:
        return False
    try:
        if json.loads(read_metadata(output.path)["provenance"])["meaning"] == meaning:
            return True
    except (LoadError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"output {output.path} is there and is no table: choose another file") from error
    raise InputError(f"output {output.path} is a table of another corpus, model or size: choose another file")


def write_table(
    config: CacheConfig,
    corpus: Corpus,
    output: Location,
    tokenizer: Any,
    vocabulary: Vocabulary,
    meaning: dict[str, Any],
) -> None:
    """Count, and write the table with its provenance; raise `InputError` if there is no text to count."""
    counts, texts, without = NgramCounts(_NGRAMS), 0, 0
    said = time.monotonic()
    for ids in token_texts(corpus, tokenizer, vocabulary.size, config.reading.limit):
        if ids is None:
            without += 1
            continue
        texts += 1
        counts.add(ids)
        if time.monotonic() - said > _LINE_SECONDS:
            said = time.monotonic()
            print(f"{texts} texts, {counts.tokens} tokens", file=sys.stderr, flush=True)
    table = counts.table(config.leaders, config.followers)
    if not len(table):
        raise InputError(
            f"input {config.input} has no text of four tokens in column {corpus.column!r}: set reading.text_column"
        )
    provenance = {
        "meaning": meaning,
        "config": asdict(config),
        "texts": texts,
        "rows_without_text": without,
        "tokens": counts.tokens,
        "versions": versions("numpy"),
        "git_commit": source_commit(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        with output.open_whole() as stream:
            stream.write(table_bytes(table, vocabulary, provenance))
    except OSError as error:
        raise InputError(f"output {config.output} cannot be written to: {one_line(error)}") from error
    what = f"{len(table)} tokens with {len(table.continuations)} followers, {table.nbytes / 2**20:.1f} MiB"
    print(f"counted:  {counts.tokens} tokens of {texts} texts; {without} rows have none")
    print(f"written:  {output.path}: {what}", flush=True)


@dataclass(frozen=True)
class Corpus:
    """Files, and the column with their texts."""

    listing: InputListing
    column: str
    kind: Kind


def open_corpus(config: CacheConfig) -> Corpus:
    """Find the files of a corpus and their column of texts.

    Raises `InputError` if there are none, or they are token ids that another model has generated.
    """
    reading, uri = config.reading, config.input
    is_output = _is_output(config)
    if is_output:
        uri = f"{uri.rstrip('/')}/data"
    listing = list_input(uri, reading.format, reading.split, reading.subset)
    read_apart(listing)
    columns: tuple[tuple[str | None, Kind], ...] = (
        (reading.text_column, "text"),
        (reading.messages_column, "messages"),
        (reading.tokens_column or ("token_ids" if is_output else None), "tokens"),
    )
    named = next(((column, kind) for column, kind in columns if column is not None), None)
    column, kind = named or _usual_column(listing)
    return Corpus(listing, column, kind)


def _is_output(config: CacheConfig) -> bool:
    output = OutputFolder(locate(config.input))
    if output.run_file.type != fs.FileType.File or output.data.type != fs.FileType.Directory:
        return False
    if config.reading.text_column is None and config.reading.messages_column is None:
        try:
            made_by = read_run(output.run_file)["meaning"].get("model")
        except (ValueError, AttributeError) as error:
            raise InputError(f"input {config.input} has a damaged run.json: name a file in its data folder") from error
        name = model_name(config.model)
        if made_by != model_fingerprint(name):
            raise InputError(
                f"input {config.input} was generated by another model ({made_by}) than {name}: set model to that one, "
                "or set reading.text_column to text, which is tokenised again"
            )
    return True


def _usual_column(listing: InputListing) -> tuple[str, Kind]:
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, 1):
            names = chunk.columns.schema.names
            if len(chunk.problems) == len(chunk.numbers):
                raise InputError(f"{file.path} begins with a row that cannot be read: {chunk.problems[0].message}")
            for column, kind in _USUAL.items():
                if column in names:
                    return column, kind
            raise InputError(
                f"{file.path} has none of the columns {', '.join(_USUAL)} (it has {', '.join(names)}): set "
                "reading.text_column, reading.messages_column or reading.tokens_column"
            )
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def token_texts(corpus: Corpus, tokenizer: Any, vocab_size: int, limit: int | None) -> Iterator[list[int] | None]:
    """Yield the token ids of each row's text, or None for a row without one.

    Raises `InputError` if a file cannot be read or lacks the column, or chats have no template.
    """
    if corpus.kind == "messages" and tokenizer.chat_template is None:
        raise InputError("the model has no chat template: set reading.text_column to a column of texts")
    column, left = corpus.column, limit
    for file in corpus.listing.files:
        for chunk in read_file(corpus.listing.filesystem, file, _ROWS, column if corpus.kind == "text" else None):
            names = chunk.columns.schema.names
            if column not in names:
                found = ", ".join(names)
                raise InputError(f"{file.path} has no column {column!r} (it has {found}): set reading.text_column")
            values = chunk.values(column)[:left]
            match corpus.kind:
                case "text":
                    texts = [value if isinstance(value, str) else "" for value in values]
                    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
                    yield from (ids or None for ids in encoded)
                case "messages":
                    yield from _of_chats(values, column, tokenizer)
                case "tokens":
                    yield from (_ids(value, f"column {column!r} of {file.path}", vocab_size) for value in values)
            if left is not None:
                left -= len(values)
                if not left:
                    return


def _of_chats(values: list[Any], column: str, tokenizer: Any) -> Iterator[list[int] | None]:
    chats: list[Chat | None] = []
    for value in values:
        try:
            asked = replace(row_conversation({column: value}, column), add_generation_prompt=False)
            chats.append(render_chat(tokenizer, asked))
        except (RowError, RequestError):
            chats.append(None)
    encoded = iter(encode_chats(tokenizer, [chat for chat in chats if chat is not None]))
    for chat in chats:
        ids = None if chat is None else next(encoded)
        yield None if isinstance(ids, RequestError) else ids


def _ids(value: Any, where: str, vocab_size: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise InputError(f"{where} holds no lists of token ids: set reading.text_column")
    beyond = next((token for token in value if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise InputError(
            f"{where} has the token {beyond}, and the model's vocabulary ends at {vocab_size - 1}: set model to the "
            "one whose tokens these are"
        )
    return value or None
