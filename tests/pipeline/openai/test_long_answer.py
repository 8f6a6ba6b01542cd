"""An answer that is written in pieces is the same answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafter.requests import Generation, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.text.conversation import Conversation
from pipeline.openai.answers import logprobs_format, long_answer, response
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import ParsedRequest, Prompt


def generation(tokens: int, logprob: float = -0.25) -> Generation:
    logprobs = [TokenLogprob(token, logprob, ((token, logprob), (7, -2.5))) for token in range(tokens)]
    return Generation("", list(range(tokens)), "é" * tokens, "stop", 3, DecodeCounts(), logprobs)


CHAT: Prompt = Conversation([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("prompt", [CHAT, "x"])
def test_the_pieces_are_the_whole(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ParsedRequest("gpt", (prompt,), {"logprobs": 2}, n=4)
    made = [generation(count) for count in (200, 0, 64, 1)]
    short = [replace(one, logprobs=None) for one in made]
    body, whole = (response(request, some, "id", 1, str) for some in (short, made))
    at_once = []

    def noted(logprobs: Sequence[TokenLogprob] | None, *others: Any) -> dict[str, Any] | None:
        at_once.append(len(logprobs or ()))
        return logprobs_format(request)(logprobs, *others)

    monkeypatch.setattr("pipeline.openai.answers.logprobs_format", lambda _: noted)
    pieces = list(long_answer(body, made, request, str))
    assert json.loads("".join(pieces)) == whole
    assert at_once == [64, 64, 64, 8, 0, 64, 1]
    assert len(pieces) == len(at_once) + 1


def test_what_is_not_finite_is_an_error() -> None:
    request = ParsedRequest("gpt", (CHAT,), {"logprobs": 0})
    made = [generation(2, math.nan)]
    body = response(request, [replace(made[0], logprobs=None)], "id", 1, str)
    with pytest.raises(OpenAIError, match="not finite"):
        list(long_answer(body, made, request, str))
