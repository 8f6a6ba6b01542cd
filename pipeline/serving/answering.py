"""From the JSON of a request's body to a replica's answer: one way for live requests and for lines of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.openai.answers import wants_speculation
from pipeline.openai.errors import OpenAIError, bad_request, parse_json, to_json
from pipeline.openai.requests import ParsedRequest, parse_chat, parse_completion
from pipeline.serving.config import LimitsConfig
from pipeline.serving.handles import Answer, Call, Engines, Failure
from pipeline.serving.work_limits import LargeWork

_LARGE_BODY = 32 << 10  # bodies above this many bytes are parsed in another thread, one at a time
PARSERS: Mapping[str, Callable[[dict[str, Any]], ParsedRequest]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
}
"""By the path of the request."""


class Answering:
    """Has bodies answered by the endpoint's engines, within its limits."""

    def __init__(self, engines: Engines, limits: LimitsConfig) -> None:
        self._engines, self._limits, self._large_work = engines, limits, LargeWork()

    async def ask(
        self, path: str, body: bytes, client: str, *, may_teach: bool, background: bool = False
    ) -> tuple[ParsedRequest, Answer]:
        """Parse the body of a request to `path` and send it to a replica; see `Call`.

        Raises:
            OpenAIError: It cannot be used, or no replica has room.
        """

        def understand() -> tuple[ParsedRequest, bool]:
            given = parse_json(body)
            speculation = wants_speculation(given)
            return PARSERS[path](given), speculation

        large, turns = len(body) > _LARGE_BODY, Call.turns_of(client, background=background)
        parsed, speculation = await self._large_work.run(turns, understand) if large else understand()
        model = self._engines.called(parsed.model)
        if model is None:
            raise no_model(parsed.model, self._engines.names)
        if parsed.choices > self._limits.choices:
            message = f"At most {self._limits.choices} choices a request are allowed."
            raise OpenAIError(400, message, "n", "invalid_value")
        if background and parsed.stream:
            raise bad_request(
                "Unsupported value: 'stream' can only be false in a batch.", "stream", "unsupported_value"
            )
        parsed = replace(parsed, model=model)
        return parsed, await self._engines.ask(Call(parsed, speculation, may_teach, client, background))

    async def answer_line(self, path: str, body: bytes, client: str, *, may_teach: bool) -> tuple[int, str]:
        """Return the HTTP status and the JSON text that a live request with the same body would get.

        It is decoded in the background: live requests do not wait for it.
        """
        try:
            if len(body) > self._limits.body_bytes:
                raise too_large(self._limits.body_bytes)
            _, answer = await self.ask(path, body, client, may_teach=may_teach, background=True)
            if isinstance(answer.first, Failure):
                return answer.first.status, to_json(answer.first.body)
            return 200, await answer.whole()
        except OpenAIError as error:
            return error.status, to_json(error.body())


def no_model(name: str, known: Sequence[str]) -> OpenAIError:
    message = f"The model '{name[:100]}' does not exist: this endpoint has {' and '.join(known)}."
    return OpenAIError(404, message, "model", "model_not_found")


def too_large(limit: int) -> OpenAIError:
    return OpenAIError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
