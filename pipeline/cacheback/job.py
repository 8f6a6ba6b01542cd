"""Counts the n-grams of a corpus into a table; the file appears as a whole."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyarrow import fs

from drafter.errors import LoadError, one_line
from drafter.source_commit import source_commit
from pipeline.cacheback.config import CacheConfig
from pipeline.cacheback.corpus_texts import Corpus, open_corpus, token_texts
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.io.listing import input_fingerprints
from pipeline.output.folder import versions

_NGRAMS = 1 << 22
"""Different n-grams that are counted at once; they take a few hundred MiB."""
_LINE_SECONDS = 10.0


def make_table(config: CacheConfig) -> None:
    """Count the n-grams of a corpus and write the table.

    Raises:
        InputError: The configuration, the corpus or the tokeniser cannot be used, or the output is something else.
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
    from drafter.methods.cacheback.frozen_table import Vocabulary
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
    """Return whether an earlier submission has made this very table.

    Raises:
        InputError: The file is something else.
    """
    from drafter.methods.cacheback.frozen_table import read_metadata

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
    vocabulary: Any,
    meaning: dict[str, Any],
) -> None:
    """Count, and write the table with its provenance.

    Raises:
        InputError: There is no text to count.
    """
    from drafter.methods.cacheback.frozen_table import NgramCounts, table_bytes

    counts, texts, without = NgramCounts(_NGRAMS), 0, 0
    said = time.monotonic()
    for ids in token_texts(corpus, tokenizer, vocabulary.size):
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
