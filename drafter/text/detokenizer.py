"""Text from tokens as they arrive."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens of a character, at most: UTF-8 has no more than four bytes for one."""


class Detokenizer:
    """Decodes one sequence's tokens incrementally. It never returns half a character.

    A token costs the same wherever in a text it is, also where many before it made no character.

    Args:
        tokenizer: A transformers tokeniser.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # The tokens whose text was returned last.
        self._new: list[int] = []  # Tokens after them, whose text has not been returned.

    def push(self, token: int) -> str:
        """Add a token and return the complete characters that it adds."""
        self._new.append(token)
        if len(self._new) > _LONGEST_CHARACTER and self._half(self._decode(self._new[-_LONGEST_CHARACTER:])):
            return ""
        # Some tokenisers put a space between words only when they decode them together, so decoding begins a few tokens
        # back.
        before, after = self._decode(self._context), self._decode(self._context + self._new)
        if after == before:  # special tokens have no text
            self._new = self._new[-_LONGEST_CHARACTER:]
        if len(after) <= len(before) or self._half(after):
            return ""
        self._context, self._new = self._new, []
        return after[len(before) :]

    @staticmethod
    def _half(text: str) -> bool:
        """Whether a text may end inside a character."""
        return text.endswith(_INCOMPLETE)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]
