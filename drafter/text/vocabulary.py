"""A tokeniser's vocabulary: what tells it from others, how long a text its tokens make, and which have no text."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any

from drafter.errors import PromptTooLongError

_COMPOSED = 4
"""A tokeniser's normaliser may make one character of several, but hardly ever of more than this."""


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits for a tokeniser's vocabulary: its tokens, added ones included, and their ids.

    Token ids mean the same wherever this is the same.
    """
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Return the characters of a tokeniser's longest token."""
    return max(map(len, tokenizer.get_vocab()))


def refuse_endless(text: str, max_length: float, longest: int) -> None:
    """Refuse a text that cannot be short enough, before it is tokenised, which would take minutes and gigabytes.

    Args:
        text: The text of a prompt.
        max_length: Tokens that prompt and output may have together.
        longest: See `longest_token`.

    Raises:
        PromptTooLongError: The text is too long.
    """
    if len(text) > max_length * longest * _COMPOSED:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, but prompt and output together may have {max_length} tokens: "
            "shorten the prompt or raise max_length"
        )


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokeniser's special tokens, which decoded texts leave out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: entry.content for token, entry in added.items() if entry.special}
