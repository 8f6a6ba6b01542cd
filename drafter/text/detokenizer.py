"""Text from tokens as they arrive, and stop strings in it."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes one sequence's tokens incrementally. It never returns half a character.

    Args:
        tokenizer: A transformers tokeniser.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # Tokens before it are in `text` and not needed as context either.
        self._read = 0  # Tokens before it are in `text`.
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token and return `text`: all complete characters so far."""
        self._ids.append(token)
        # Some tokenisers put a space between words only when they decode them together, so decoding begins a few tokens
        # back.
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self.text += after[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        return self.text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Return the part of `text` before the first stop string in it; None if there is none."""
    found = [at for at in (text.find(one) for one in stop) if at >= 0]
    return text[: min(found)] if found else None


def safe_length(text: str, stop: tuple[str, ...]) -> int:
    """Return how many characters of `text` can be shown: all but an end that may be the beginning of a stop string."""
    longest = max(map(len, stop), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(one.startswith(text[start:]) for one in stop):
            return start
    return len(text)
