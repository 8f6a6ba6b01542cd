"""Tokens of the texts that a grammar forces, as llguidance asks for them."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from itertools import product
from typing import Any

import llguidance.hf
from llguidance import LLTokenizer

from drafter.errors import RequestError, first_line

_WINDOW, _OPEN = 1000, 8
"""Characters of a text that are tokenised at a time, and tokens at their end that what follows might change."""


class Spelling:
    """A vocabulary, and how texts are written by its ordinary tokens, in the form of llguidance's `TokenizerWrapper`.

    A text may contain that of an added token, or what the tokeniser's normaliser would change. Its tokens then are not
    those of the tokeniser: they must come out as the text, byte for byte, and none of them may be special.

    Args:
        tokenizer: A fast tokeniser.
        vocabulary: Number of tokens, with those that only pad it.

    Attributes:
        added: Texts of the added tokens that no text of a grammar matches, by id.

    Raises:
        RequestError: llguidance cannot read the tokeniser.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        try:
            plain: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(eos), slices=[])
        except Exception as error:  # its Rust code raises what it likes
            raise RequestError(
                f"structured_outputs need a tokeniser that llguidance can read: {first_line(error)}"
            ) from error
        # It keeps the tokens of the first 10,000 words that it sees. A request's own would save time for other ones,
        # which could tell by that what it has asked for.
        for word in product("abcdefghij", repeat=4):
            plain.tokenize_str("".join(word))
        self._plain, self._eos, self.eos_token_id = plain, sorted(eos), min(eos)
        self._special = {token for token in range(vocabulary) if plain.is_special_token(token)}
        added = tokenizer.added_tokens_decoder.items()
        self.added = {token: entry.content for token, entry in added if token in self._special}
        self.special_token_ids = sorted(self._special)
        self.tokens = [
            self.added.get(token, f"<[{token}]>").encode() if token in self._special else plain.decode_bytes([token])
            for token in range(vocabulary)
        ]

    def made(self) -> LLTokenizer:
        return LLTokenizer(self, eos_token=self._eos)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text; of a long one, only those of its beginning, which are all that is asked for."""
        if len(text) > _WINDOW:
            return self._exact(text[:_WINDOW])[:-_OPEN]
        return self._exact(text)

    def _exact(self, text: str) -> list[int]:
        tokens = self._plain.tokenize_str(text)
        if self._spell(tokens, text):
            return tokens
        found = []
        for part in self._texts.split(text):
            tokens = self._plain.tokenize_str(part)
            found += tokens if self._spell(tokens, part) else self._plain.greedy_tokenize(part)
        return found

    def _spell(self, tokens: list[int], text: str) -> bool:
        return self._special.isdisjoint(tokens) and self._plain.decode_bytes(tokens) == text.encode()

    @cached_property
    def _texts(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self.added.values(), key=len, reverse=True)))})")
