"""A target model's tokeniser: loading, and guards around it.

The guards make a failure affect one prompt only: a tokeniser in Rust panics, which is no `Exception`. Nothing here
imports model code, which takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from drafter.errors import LoadError, PromptTooLongError, RequestError, first_line, one_line
from drafter.gguf_files import pretrained

_MOST_WRITTEN = 64  # characters that a normaliser makes of one; the longest that tokenisers write is a token's text
_SPLITS_DIGITS = frozenset({"smollm"})  # values of `tokenizer.ggml.pre`
_COMPOSED = 4  # most characters that a tokeniser's normaliser composes to one, with few exceptions


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Load the tokeniser of a model, given by hub id, folder or GGUF file; raise `LoadError` if there is none."""
    name = os.path.expanduser(name_or_path)
    source, settings = pretrained(name)
    if local_files_only:
        settings["local_files_only"] = True
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
        if "gguf_file" in settings:
            _split_digits(tokenizer, Path(source) / settings["gguf_file"])
    except Exception as error:  # tokenizers raises bare `Exception` for a damaged file
        raise LoadError(f"no tokenizer at {name!r}: {first_line(error)}") from error
    _refuse_multiplying(getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None), name)
    return tokenizer


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Let a GGUF file's tokeniser take each digit by itself where the model's does; transformers leaves that undone."""
    from transformers.integrations.gguf import read_gguf_metadata  # with torch

    if read_gguf_metadata(str(gguf))[0].get("tokenizer.ggml.pre") in _SPLITS_DIGITS:
        inner = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])


def _refuse_multiplying(normalizer: Any, name: str) -> None:
    """Raise `LoadError` for a normaliser that makes long texts of short ones."""
    probes = list(string.printable)
    text = string.printable
    for step in _steps(normalizer):  # one by one: of a character all together may make gigabytes
        state = json.loads(step.__getstate__())
        probes.append(state.get("pattern", {}).get("String", ""))
        text += probes[-1]
        if len(state.get("content", "")) <= _MOST_WRITTEN and len(text) <= _MOST_WRITTEN * len(probes):
            text = step.normalize_str(text)
        else:
            break
    else:
        if normalizer is None or all(
            len(normalizer.normalize_str(one)) <= _MOST_WRITTEN * (len(one) or 1) for one in probes
        ):
            return
    raise LoadError(
        f"the tokenizer at {name!r} has a normalizer that makes more than {_MOST_WRITTEN} characters of one: a prompt "
        "would take any time and memory"
    )


def _steps(normalizer: Any) -> Iterator[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        inner: Any = normalizer  # whose types leave out that it is iterated over
        for one in inner:
            yield from _steps(one)
    elif isinstance(normalizer, normalizers.Normalizer):
        yield normalizer


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits of a tokeniser's tokens and ids, added ones included. Equal digests mean equal token ids."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Return the number of characters of a tokeniser's longest token."""
    return max(map(len, tokenizer.get_vocab()))


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokeniser's special tokens, which decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: entry.content for token, entry in added.items() if entry.special}


@lru_cache(maxsize=4)
def mark_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the added tokens that the text of an output cannot spell: no text of a grammar matches them.

    They are the special ones, and by llguidance's rule those in angle brackets.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token: entry.content
        for token, entry in added.items()
        if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
    }


def forget_words(tokenizer: Any) -> None:
    """Drop what a tokeniser keeps of the words of all texts so far: those would take less time than others."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and hasattr(model, "_clear_cache"):
        model._clear_cache()


def refuse_endless(text: str, max_length: float, longest: int) -> None:
    """Raise `PromptTooLongError` for a text that is more than `max_length` tokens of up to `longest` characters."""
    # To tokenise it would take minutes and gigabytes.
    if len(text) > max_length * longest * _COMPOSED:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, but prompt and output together may have {max_length} tokens: "
            f"{PromptTooLongError.ADVICE}"
        )


def refuse_long(prompt_tokens: int, max_length: int) -> None:
    """Raise `PromptTooLongError` unless `max_length`, of prompt and output together, leaves room for output."""
    if prompt_tokens >= max_length:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but prompt and output together may have {max_length}: "
            f"{PromptTooLongError.ADVICE}"
        )


def tokenise(tokenizer: Any, texts: list[str], **settings: Any) -> Any:
    """Call a tokeniser; raise `RequestError` if it panics on one of the texts."""
    with refuse_panics():
        return tokenizer(texts, verbose=False, **settings)  # which would warn of long texts: they are refused


def tokenise_each(tokenizer: Any, texts: list[str], **settings: Any) -> list[list[int] | RequestError]:
    """Return the tokens of each text, or its error: together, in parallel, unless the tokeniser panics on one."""
    if not texts:
        return []
    try:
        return list(tokenise(tokenizer, texts, **settings)["input_ids"])
    except RequestError as error:
        alone = len(texts) == 1
        return [error] if alone else [one for text in texts for one in tokenise_each(tokenizer, [text], **settings)]


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turn a tokeniser's panic in a `with` block into a `RequestError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 makes the class, and gives it to no module
            raise
        raise RequestError(
            f"the tokenizer of the model fails on this text ({one_line(error, 200)}): change or leave out the text"
        ) from error
