"""A target model's tokeniser: loading it, facts of its vocabulary, and the prompts that are too long.

It imports no model code, which takes a process seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from drafter.errors import LoadError, PromptTooLongError, first_line
from drafter.hub import local_only

_COMPOSED = 4
"""Most characters that a tokeniser's normaliser composes to one, with few exceptions."""


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Load the tokeniser of a target model.

    Args:
        name_or_path: Hub id or folder of the target model.
        trust_remote_code: Run code that comes with it.
        local_files_only: Download nothing.

    Raises:
        LoadError: There is none to load.
    """
    name = os.path.expanduser(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=local_files_only or local_only(name)
        )
    except Exception as error:  # tokenizers raises bare `Exception` for a damaged file
        raise LoadError(f"no tokenizer at {name!r}: {first_line(error)}") from error


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits of a tokeniser's tokens and ids, added ones included. Equal digests mean equal token ids."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Return the number of characters of a tokeniser's longest token."""
    return max(map(len, tokenizer.get_vocab()))


def refuse_endless(text: str, max_length: float, longest: int) -> None:
    """Refuse a text that must be more than `max_length` tokens, as tokenising it would take minutes and gigabytes.

    Raises:
        PromptTooLongError: The text is too long.
    """
    if len(text) > max_length * longest * _COMPOSED:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, but prompt and output together may have {max_length} tokens: "
            "shorten the prompt or raise max_model_len"
        )


def refuse_long(prompt_tokens: int, max_length: int) -> None:
    """Refuse a prompt that leaves no room for output.

    Args:
        prompt_tokens: Its length.
        max_length: Tokens that prompt and output may have together.

    Raises:
        PromptTooLongError: It leaves none.
    """
    if prompt_tokens >= max_length:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but prompt and output together may have {max_length}: "
            "shorten the prompt or raise max_model_len"
        )


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokeniser's special tokens, which decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: entry.content for token, entry in added.items() if entry.special}
