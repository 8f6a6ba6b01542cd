"""Count which tokens follow each other in a corpus, and write the most frequent n-grams to a file: a frozen table.

The drafter cacheback asks it after the texts that it decodes. The corpus is any input of drafter generate with texts,
chats or token ids in a column, or the output of such a job. The table belongs to the tokeniser of --model.

  python -m recipes.cacheback --input 'texts/*.parquet' --column text --output table.safetensors
  python -m recipes.cacheback --input results --model MODEL --output table.safetensors
  drafter generate --drafter cacheback:table.safetensors --model MODEL --input … --output …
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import fs

from drafter.errors import LoadError, RequestError, one_line
from drafter.methods.cacheback.frozen_table import read_metadata, table_bytes
from drafter.source_commit import source_commit
from drafter.text.chat import Chat, encode_chats, render_chat
from drafter.text.tokenizers import load_tokenizer, tokenise, vocabulary_digest
from pipeline.cluster.model_copies import model_name
from pipeline.command_line import at_least, run_job
from pipeline.engines.models import model_fingerprint
from pipeline.errors import InputError, RowError
from pipeline.generate.prompts import row_conversation
from pipeline.io.files import locate
from pipeline.io.listing import InputListing, input_fingerprints, list_input, read_apart
from pipeline.io.reading import read_file
from pipeline.output.folder import OutputFolder, versions
from pipeline.report.outputs import read_run_of
from recipes.cacheback.counting import NgramCounts

_ROWS = 512  # rows that are tokenised together
_NGRAMS = 1 << 22  # different n-grams that are counted at once; they take a few hundred MiB
_USUAL = ("text", "prompt", "messages", "token_ids")  # columns to look for where none is named


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe as a command line says (`sys.argv` by default); return the exit code of `run_job`."""
    parser = argparse.ArgumentParser(
        "python -m recipes.cacheback", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="file, folder, pattern, URI, or output of drafter generate")
    parser.add_argument("--output", required=True, help="file for the table; one that is there is replaced")
    parser.add_argument("--model", help="target model, whose tokeniser's ids it has (default: the embedded one)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the tokeniser")
    parser.add_argument("--format", default="auto", help="format of the files (default: by their names)")
    parser.add_argument("--split", help="split of a Hugging Face dataset")
    parser.add_argument("--subset", help="subset of a Hugging Face dataset")
    parser.add_argument("--column", help="texts, chats or token ids (default: generated tokens, or a usual name)")
    parser.add_argument("--limit", type=int, help="take at most this many rows")
    parser.add_argument("--leaders", type=int, default=65_536, help="most tokens with followers (%(default)s)")
    parser.add_argument("--followers", type=int, default=8, help="most followers of a token (%(default)s)")
    config = parser.parse_args(arguments)
    return run_job(lambda _: make_table(config), arguments, resumes=False)


def make_table(config: Namespace) -> None:
    """Count the n-grams of a corpus and write the table.

    Raises `InputError` if the corpus or the tokeniser cannot be used, or the output is something else.
    """
    for name in ("limit", "leaders", "followers"):
        at_least(name, getattr(config, name), 1)
    if "://" in config.output:
        raise InputError(f"output {config.output} is a URI: every engine reads the table from a path, so give one")
    listing, column = open_corpus(config)
    output = locate(config.output)
    try:
        if output.type == fs.FileType.Directory:
            raise InputError(f"output {config.output} is a folder: name a file for the table")
        if output.exists:
            read_metadata(output.path)
        Path(output.path).parent.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.trust_remote_code)
    except LoadError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"output {config.output} cannot be written to: {one_line(error)}") from error
    counts, texts, without = NgramCounts(_NGRAMS), 0, 0
    for ids in token_texts(listing, column, tokenizer, config.limit):
        counts.add(ids)
        texts, without = texts + bool(ids), without + (not ids)
    table = counts.table(config.leaders, config.followers)
    if not len(table):
        raise InputError(f"input {config.input} has no text of four tokens in column {column!r}: set --column")
    provenance = {
        "config": vars(config),
        "input": input_fingerprints(listing),
        "column": column,
        "texts": texts,
        "rows_without_text": without,
        "tokens": counts.tokens,
        "versions": versions("numpy"),
        "git_commit": source_commit(),
    }
    try:
        with output.open_whole() as stream:
            stream.write(table_bytes(table, vocabulary_digest(tokenizer), provenance))
    except OSError as error:
        raise InputError(f"output {config.output} cannot be written to: {one_line(error)}") from error
    print(f"counted:  {counts.tokens} tokens of {texts} texts; {without} rows have none")
    print(f"written:  {output.path}: {len(table)} tokens with {len(table.continuations)} followers", flush=True)


def open_corpus(config: Namespace) -> tuple[InputListing, str]:
    """Find the files of a corpus and their column of texts.

    Raises `InputError` if there are none, or they are token ids that another model has generated.
    """
    uri, column = config.input, config.column
    output = OutputFolder(locate(uri))
    if output.run_file.type == fs.FileType.File and output.data.type == fs.FileType.Directory:
        uri, column = f"{uri.rstrip('/')}/data", column or "token_ids"
        name, made_by = model_name(config.model), read_run_of(output)["meaning"].get("model")
        if column == "token_ids" and made_by != model_fingerprint(name):
            raise InputError(
                f"input {config.input} was generated by another model ({made_by}) than {name}: set model to that one, "
                "or set --column to text, which is tokenised again"
            )
    listing = list_input(uri, config.format, config.split, config.subset)
    read_apart(listing)
    if column is not None:
        return listing, column
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, 1):
            if chunk.problems:
                raise InputError(f"{file.path} begins with a row that cannot be read: {chunk.problems[0].message}")
            names = chunk.columns.schema.names
            if (found := next((one for one in _USUAL if one in names), None)) is not None:
                return listing, found
            raise InputError(
                f"{file.path} has none of the columns {', '.join(_USUAL)} (it has {', '.join(names)}): set --column"
            )
    raise InputError(f"input {config.input} has no rows")


def token_texts(listing: InputListing, column: str, tokenizer: Any, limit: int | None) -> Iterator[list[int]]:
    """Yield the token ids of each row's text, none for a row without one.

    Raises `InputError` if a file cannot be read or lacks the column, tokens are of another vocabulary, or chats have no
    template.
    """
    left, largest = limit, max(tokenizer.get_vocab().values())
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, _ROWS):
            names = chunk.columns.schema.names
            if column not in names:
                raise InputError(f"{file.path} has no column {column!r} (it has {', '.join(names)}): set --column")
            values = chunk.values(column)[:left]
            for ids in _token_ids(values, column, tokenizer):
                if ids and not 0 <= min(ids) <= max(ids) <= largest:
                    beyond = next(token for token in ids if not 0 <= token <= largest)
                    raise InputError(
                        f"column {column!r} of {file.path} has the token {beyond}, and the model's vocabulary ends "
                        f"at {largest}: set model to the one whose tokens these are"
                    )
                yield ids
            if left is not None:
                left -= len(values)
                if not left:
                    return


def _token_ids(values: Sequence[Any], column: str, tokenizer: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in values]
    texts: dict[int, str] = {}
    chats: dict[int, Chat] = {}
    for row, value in enumerate(values):
        if column == "messages" or (isinstance(value, list) and value and isinstance(value[0], dict)):
            if tokenizer.chat_template is None:
                raise InputError("the model has no chat template: set --column to a column of texts")
            try:
                asked = replace(row_conversation({column: value}, column), add_generation_prompt=False)
                chats[row] = render_chat(tokenizer, asked)
            except (RowError, RequestError):
                continue
        elif isinstance(value, list) and all(isinstance(token, int) for token in value):
            found[row] = value
        elif isinstance(value, str) and value and column != "token_ids":
            texts[row] = value
    if texts:
        encoded = tokenise(tokenizer, list(texts.values()), add_special_tokens=False)["input_ids"]
        for row, ids in zip(texts, encoded, strict=True):
            found[row] = ids
    for row, one in zip(chats, encode_chats(tokenizer, list(chats.values())), strict=True):
        found[row] = [] if isinstance(one, RequestError) else one
    return found


if __name__ == "__main__":
    sys.exit(main())
