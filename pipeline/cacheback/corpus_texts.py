"""The configuration of a job that makes a table of n-grams, and its command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyarrow import fs

from drafter.errors import RequestError
from drafter.text.chat import Chat, encode_chats, render_chat
from pipeline.command_line import at_least, make_parser, parse
from pipeline.engines.models import model_fingerprint, model_name
from pipeline.errors import InputError, RowError
from pipeline.generate.row_requests import row_messages
from pipeline.io.files import locate
from pipeline.io.listing import InputFile, InputListing, list_input
from pipeline.io.reading import read_file
from pipeline.output.folder import OutputFolder
from pipeline.output.run_file import read_run


@dataclass(frozen=True)
class CorpusConfig:
    """Which texts are counted.

    Args:
        format: Format of the input files; `auto` goes by their names.
        split: Which split of a Hugging Face dataset, such as `train`; by default the only one.
        subset: Which subset of a Hugging Face dataset; by default the only one, or `default`.
        text_column: Column of texts. By default, of an output of jobs.generate the generated tokens are counted, and of
            anything else the first column of `text`, `prompt`, `messages` and `token_ids` that there is.
        messages_column: Column of chats: a list of {role, content}, or that list as JSON text.
        tokens_column: Column of token ids of this model's tokeniser.
        limit: Take at most this many rows.
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text", "arrow"] = "auto"
    split: str | None = None
    subset: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    tokens_column: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        given = [
            name for name in ("text_column", "messages_column", "tokens_column") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise InputError(f"reading.{given[0]} and reading.{given[1]} are both set: a row has one text")
        at_least("reading.limit", self.limit, 1)


@dataclass(frozen=True)
class CacheConfig:
    """A job that makes a table of n-grams.

    Args:
        input: The corpus: a file, a folder, a pattern, a URI, or the output of a job of jobs.generate.
        output: File for the table.
        model: Base model, whose tokeniser's ids the table has: hub id or folder; by default the embedded one.
        trust_remote_code: Run code that comes with the tokeniser.
        reading: Which texts are counted.
        leaders: Tokens that the table has followers of, at most: the most frequent ones.
        followers: Followers of a token at most: the most frequent ones. Each is three tokens.
    """

    input: str
    output: str
    model: str | None = None
    trust_remote_code: bool = False
    reading: CorpusConfig = field(default_factory=CorpusConfig)
    leaders: int = 65_536
    followers: int = 8

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        if "://" in self.output:
            raise InputError(f"output {self.output} is a URI: every engine reads the table from a path, so give one")
        at_least("leaders", self.leaders, 1)
        at_least("followers", self.followers, 1)


_DESCRIPTION = """\
Count which tokens follow each other in a corpus, and write the most frequent n-grams to a file: a
frozen table for the drafter cacheback, which asks it after the texts that it decodes.

The corpus is any input of jobs.generate with texts, chats or token ids in a column, or the output of
such a job. The table belongs to the tokeniser of --model.

  python -m jobs.cache --input 'texts/*.parquet' --reading.text_column text --output table.safetensors
  python -m jobs.cache --input results --model MODEL --output table.safetensors
  python -m jobs.generate --drafter cacheback:table.safetensors --model MODEL --input … --output …"""


def parse_config(arguments: Sequence[str] | None = None) -> CacheConfig:
    """Read the configuration from a command line; see `command_line.parse`."""
    return parse(
        CacheConfig, make_parser(CacheConfig, "jobs.cache", "--input PATH --output FILE", _DESCRIPTION), arguments
    )


# ---- The texts of a corpus as token ids, whatever its rows hold.

_ROWS = 512
"""Rows that are tokenised together."""
_GENERATED = "token_ids"
"""Column of an output of jobs.generate."""

Kind = Literal["text", "messages", "tokens"]
_USUAL: tuple[tuple[str, Kind], ...] = (
    ("text", "text"),
    ("prompt", "text"),
    ("messages", "messages"),
    (_GENERATED, "tokens"),
)
"""Columns that are looked for where none is named."""


@dataclass(frozen=True)
class Corpus:
    """Where texts are.

    Args:
        listing: The files.
        column: Their column with the texts.
        kind: What the column holds.
        limit: Rows at most.
    """

    listing: InputListing
    column: str
    kind: Kind
    limit: int | None


def open_corpus(config: CacheConfig) -> Corpus:
    """Find the files of a corpus and where the texts are in them.

    Raises:
        InputError: There are none, or they are token ids that another model has generated.
    """
    reading, uri = config.reading, config.input
    is_output = _is_output(config)
    if is_output:
        uri = f"{uri.rstrip('/')}/data"
    listing = list_input(uri, reading.format, reading.split, reading.subset)
    columns: tuple[tuple[str | None, Kind], ...] = (
        (reading.text_column, "text"),
        (reading.messages_column, "messages"),
        (reading.tokens_column or (_GENERATED if is_output else None), "tokens"),
    )
    named = next(((column, kind) for column, kind in columns if column is not None), None)
    column, kind = named or _usual_column(listing)
    return Corpus(listing, column, kind, reading.limit)


def _is_output(config: CacheConfig) -> bool:
    """Return whether the input is the output of a generation job, whose tokens are then this model's."""
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
            for column, kind in _USUAL:
                if column in names:
                    return column, kind
            raise InputError(
                f"{file.path} has none of the columns {', '.join(name for name, _ in _USUAL)} (it has "
                f"{', '.join(names)}): set reading.text_column, reading.messages_column or reading.tokens_column"
            )
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def token_texts(corpus: Corpus, tokenizer: Any, vocab_size: int) -> Iterator[list[int] | None]:
    """Yield the token ids of each row's text, or None for a row without one.

    Args:
        corpus: The texts.
        tokenizer: Of the base.
        vocab_size: Token ids are below it.

    Raises:
        InputError: A file cannot be read or lacks the column, chats have no template, or token ids are another
            tokeniser's.
    """
    if corpus.kind == "messages" and tokenizer.chat_template is None:
        raise InputError("the model has no chat template: set reading.text_column to a column of texts")
    left = corpus.limit
    for file in corpus.listing.files:
        text_column = corpus.column if corpus.kind == "text" else None
        for chunk in read_file(corpus.listing.filesystem, file, _ROWS, text_column):
            values = _column(corpus, file, chunk.columns)[:left]
            match corpus.kind:
                case "text":
                    yield from _of_texts(values, tokenizer)
                case "messages":
                    yield from _of_chats(values, corpus.column, tokenizer)
                case "tokens":
                    yield from (_ids(value, file, corpus.column, vocab_size) for value in values)
            if left is not None:
                left -= len(values)
                if not left:
                    return


def _column(corpus: Corpus, file: InputFile, rows: pa.Table) -> list[Any]:
    if corpus.column not in rows.schema.names:
        found = ", ".join(rows.schema.names)
        raise InputError(f"{file.path} has no column {corpus.column!r} (it has {found}): set reading.text_column")
    values: list[Any] = rows[corpus.column].to_pylist()
    return values


def _of_texts(values: Sequence[Any], tokenizer: Any) -> Iterator[list[int] | None]:
    texts = [value if isinstance(value, str) else "" for value in values]
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield ids or None


def _of_chats(values: Sequence[Any], column: str, tokenizer: Any) -> Iterator[list[int] | None]:
    chats: list[Chat | None] = []
    for value in values:
        try:
            chats.append(render_chat(tokenizer, row_messages(value, column)))
        except (RowError, RequestError):
            chats.append(None)
    encoded = iter(encode_chats(tokenizer, [chat for chat in chats if chat is not None]))
    for chat in chats:
        ids = None if chat is None else next(encoded)
        yield None if isinstance(ids, RequestError) else ids


def _ids(value: Any, file: InputFile, column: str, vocab_size: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise InputError(f"column {column!r} of {file.path} holds no lists of token ids: set reading.text_column")
    beyond = next((token for token in value if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise InputError(
            f"column {column!r} of {file.path} has the token {beyond}, and the model's vocabulary ends at "
            f"{vocab_size - 1}: set model to the one whose tokens these are"
        )
    return value or None
