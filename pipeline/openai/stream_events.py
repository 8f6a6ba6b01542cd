"""The events of a streamed answer, in OpenAI's schema.

An event with text is one decode step: the accepted draft tokens, and the target model's own token after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from drafter.requests import Generation, TokenDelta
from pipeline.openai.answers import (
    TokenText,
    chat_logprobs,
    completion_logprobs,
    generation_statistics,
    lossless_mark,
    step_statistics,
    usage,
)
from pipeline.openai.requests import OpenAIError, ParsedRequest, to_json

DONE = "data: [DONE]\n\n"
"""The last event of a stream, unless it failed."""


def event(data: dict[str, Any]) -> str:
    """Return a server-sent event.

    Raises:
        ValueError: It has a number that is not finite.
    """
    return f"data: {to_json(data)}\n\n"


def error_event(error: OpenAIError) -> str:
    """Return the event that ends a failed stream."""
    return event(error.body())


class Chunks(ABC):
    """The chunks of one streamed answer, as server-sent events.

    Args:
        name: The answer's `id`.
        created: Seconds since 1970.
        speculation: Whether each chunk has draft statistics; see `pipeline.openai.answers`.
    """

    kind: str
    """OpenAI's name of the chunks."""

    def __init__(
        self, request: ParsedRequest, name: str, created: int, token_text: TokenText, *, speculation: bool
    ) -> None:
        self._request, self._name, self._created = request, name, created
        self._token_text, self._speculation = token_text, speculation

    @abstractmethod
    def begin(self, index: int) -> str:
        """Return the event before the first text of choice `index`; may be empty."""

    @abstractmethod
    def _content(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        """Return the text of a step of choice `index`, and its log-probabilities."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """Return a choice without text."""

    def step(self, index: int, delta: TokenDelta) -> str:
        """Return the chunk of one decode step of choice `index`.

        Raises:
            OpenAIError: A log-probability is not a number.
        """
        extension = {"speculation": step_statistics(delta)} if self._speculation else {}
        return self._chunk([{"index": index, **self._content(index, delta), "finish_reason": None}], **extension)

    def finish(self, index: int, generation: Generation) -> str:
        """Return the last chunk of choice `index`."""
        extension = {"speculation": generation_statistics(generation)} if self._speculation else {}
        choice = {"index": index, **self._empty(), "finish_reason": generation.finish_reason}
        return self._chunk([choice], **extension, **lossless_mark(generation))

    def end(self, generations: Sequence[Generation]) -> str:
        """Return the end of the stream, with the usage if it was asked for."""
        if not self._request.include_usage:
            return DONE
        return self._chunk([], usage=usage(generations, self._request.n)) + DONE

    def _chunk(self, choices: list[dict[str, Any]], **extension: Any) -> str:
        # With `include_usage` all chunks have the field, and the last one its value.
        last = {"usage": None, **extension} if self._request.include_usage else extension
        return event(
            {
                "id": self._name,
                "object": self.kind,
                "created": self._created,
                "model": self._request.model,
                "system_fingerprint": None,
                "choices": choices,
                **last,
            }
        )


class ChatChunks(Chunks):
    """The chunks of a chat completion."""

    kind = "chat.completion.chunk"

    def begin(self, index: int) -> str:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _content(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        return {"delta": {"content": delta.text}, "logprobs": chat_logprobs(delta.logprobs, self._token_text)}

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}


class CompletionChunks(Chunks):
    """The chunks of a text completion."""

    kind = "text_completion"

    def __init__(
        self, request: ParsedRequest, name: str, created: int, token_text: TokenText, *, speculation: bool
    ) -> None:
        super().__init__(request, name, created, token_text, speculation=speculation)
        self._offsets = [0] * request.choices

    def begin(self, index: int) -> str:
        return ""

    def _content(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        logprobs = completion_logprobs(delta.logprobs, self._token_text, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"text": delta.text, "logprobs": logprobs}

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}
