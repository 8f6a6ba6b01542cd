"""OpenAI's batch format: JSON lines of requests, and of answers or errors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from drafter.requests import Generation
from pipeline.openai.answers import TokenText, answer_id, lossless_mark, response
from pipeline.openai.errors import OpenAIError, bad_request, missing, parse_json, to_json
from pipeline.openai.requests import ParsedRequest, parse_chat, parse_completion

LINE_FIELDS = ("custom_id", "method", "url", "body")
MOST_CHOICES = 16_384
"""Of a line. Each is a row of the job with a copy of the body, and 10 KB may ask for hundreds of thousands."""
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


def parse_line(line: Mapping[str, Any]) -> ParsedRequest:
    """Parse a line's `LINE_FIELDS`, of which the body is JSON text.

    Raises `OpenAIError` if it is not a request that can be answered.
    """
    for name, allowed in (("method", ("POST",)), ("url", (_CHAT, _COMPLETION))):
        if line.get(name) is None:
            raise missing(name)
        if line[name] not in allowed:
            message = f"Unsupported value: '{name}' can only be {' or '.join(allowed)}, not {line[name]}."
            raise bad_request(message, name, "unsupported_value")
    if line.get("body") is None:
        raise missing("body")
    body = parse_json(line["body"].encode())
    request = parse_chat(body) if line["url"] == _CHAT else parse_completion(body)
    if request.choices > MOST_CHOICES:
        message = f"At most {MOST_CHOICES} choices a line are allowed, not {request.choices}: make several lines of it."
        raise bad_request(message, "prompt" if request.n == 1 else "n", "invalid_value")
    scored = request.prompt_logprobs is not None
    flags = {"stream": request.stream, "echo": request.echo, "return_token_ids": request.token_ids}
    for name, wanted in {**flags, "prompt_logprobs": scored}.items():
        if wanted:
            only = "false" if name in flags else "null"
            message = f"Unsupported value: '{name}' can only be {only} in a batch."
            raise bad_request(message, name, "unsupported_value")
    return request


def answer_line(
    request: ParsedRequest, custom_id: str, generations: Sequence[Generation], created: int, token_text: TokenText
) -> dict[str, Any]:
    """Return the line that answers a request, or an error line for numbers that are not finite; see `response`."""
    name = _name(custom_id, created)
    try:
        body = response(request, generations, answer_id(request, name), created, token_text)
    except OpenAIError as error:
        return refusal_line(custom_id, created, error)
    body |= lossless_mark(*generations)
    return _line(custom_id, name, {"status_code": 200, "request_id": f"req_{name}", "body": body}, None)


def refusal_line(custom_id: str, created: int, error: OpenAIError) -> dict[str, Any]:
    """Return the line for a request that is answered with an error."""
    name = _name(custom_id, created)
    refusal = {"status_code": error.status, "request_id": f"req_{name}", "body": error.body()}
    return _line(custom_id, name, refusal, None)


def failure_line(custom_id: str | None, place: str, created: int, code: str, message: str) -> dict[str, Any]:
    """Return the line for input that is not a request, or was given up; named by `place` without a `custom_id`."""
    name = _name(place if custom_id is None else custom_id, created)
    return _line(custom_id, name, None, {"code": code, "message": message})


def answered_line(custom_id: str | None, place: str, created: int, status: int, body: str) -> str:
    """Return the JSON text of the line for a request that was answered with an HTTP status and a body of JSON text.

    It is named by `place` without a `custom_id`.
    """
    name = _name(place if custom_id is None else custom_id, created)
    head = to_json({"id": f"batch_req_{name}", "custom_id": custom_id})[:-1]
    response = f'{{"status_code":{status},"request_id":"req_{name}","body":{body}}}'
    return f'{head},"response":{response},"error":null}}'


def _line(
    custom_id: str | None, name: str, answer: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": answer, "error": error}


def _name(custom_id: str, created: int) -> str:
    return hashlib.blake2b(f"{created}:{custom_id}".encode(), digest_size=12).hexdigest()
