"""The text of a row's output: where it ends, what a stream gets of it, and the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from drafter.engine.handle import Handle
from drafter.parts.contract import NewTokens, Room, Row, RowPart
from drafter.requests import TokenDelta
from drafter.text.text_stream import TextStream


class TextPart(RowPart):
    """Reads the tokens one by one if there are stop strings, or somebody looks on; or else all of them at the end."""

    def __init__(self, tokenizer: Any, handle: Handle) -> None:
        self._said = TextStream(tokenizer, handle.request.prompt_ids, handle.request.sampling)
        self._streams, self._reads_on = handle.streams, handle.streams or self._said.searches
        self._read = 0  # tokens that have been read
        self._shown = 0  # characters of the answer that the caller has
        self._forced = 0  # tokens so far about which there was no choice
        self._forced_parts: list[tuple[int, int]] = []  # (start, end) of these tokens' characters

    def after_token(self, row: Row) -> Literal["stop"] | None:
        if not self._reads_on:
            return None
        begin = self._said.length
        self._read_on(row)
        if row.counts.num_forced_tokens > self._forced:
            self._forced = row.counts.num_forced_tokens
            self._forced_parts.append((begin, self._said.length))
        return "stop" if self._said.found else None

    def after_step(self, row: Row, new: NewTokens) -> None:
        if not (self._streams and new.tokens):
            return
        said = self._said.new() if row.finish_reason is None else self._said.rest()
        shown, self._shown = self._shown, self._shown + len(said.text)
        forced = self._forced_within(shown, self._shown)
        reasoning = said.reasoning or ""
        row.handle.push(
            TokenDelta(new.tokens, said.text, new.accepted, new.logprobs, forced, reasoning, marked=said.marked)
        )

    def result(self, row: Row) -> Mapping[str, Any]:
        self._read_on(row)
        said = self._said.whole()
        return {"text": said.text, "reasoning_content": said.reasoning, "marked": said.marked}

    def _read_on(self, row: Row) -> None:
        self._said.push(*row.output[self._read :])
        self._read = len(row.output)

    def _forced_within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return which of the characters from `begin` to `end` were forced, counted from `begin`, and forget these."""
        parts = [(max(start, begin), min(stop, end)) for start, stop in self._forced_parts]
        self._forced_parts = [part for part in self._forced_parts if part[1] > end]
        return [(start - begin, stop - begin) for start, stop in parts if start < stop]


def text_room(tokenizer: Any) -> Room:
    """Return what makes the texts of outputs by a tokeniser."""
    return lambda handle: TextPart(tokenizer, handle)
