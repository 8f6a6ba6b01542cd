"""Answers parse with the client's own types, and say what was generated."""

from __future__ import annotations

from openai.types import Completion
from openai.types.chat import ChatCompletion

from drafter.requests import Generation
from drafter.statistics import DecodeCounts
from pipeline.openai.requests import ParsedRequest
from pipeline.openai.responses import chat_response, completion_response


def generation(text: str, tokens: int, prompt: int, accepted: int, drafted: int) -> Generation:
    counts = DecodeCounts(num_accepted_draft_tokens=accepted, num_draft_tokens=drafted)
    return Generation("", list(range(tokens)), text, "stop", prompt, counts)


def test_a_chat_of_two_choices() -> None:
    request = ParsedRequest("gpt", ([{"role": "user", "content": "x"}],), {}, n=2)
    made = [generation("a", 4, 10, 2, 9), generation("b", 3, 10, 1, 5)]
    body = chat_response(request, made, "chatcmpl-1", 1700000000, str)
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert [(choice.index, choice.message.content) for choice in parsed.choices] == [(0, "a"), (1, "b")]
    assert (parsed.id, parsed.created, parsed.model) == ("chatcmpl-1", 1700000000, "gpt")
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (10, 7, 17)
    details = parsed.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 11)


def test_a_completion_of_two_prompts_with_two_choices_each() -> None:
    request = ParsedRequest("davinci", ("x", "y"), {}, n=2)
    made = [generation(text, 2, prompt, 0, 0) for text, prompt in (("a", 5), ("b", 5), ("c", 7), ("d", 7))]
    parsed = Completion.model_validate(completion_response(request, made, "cmpl-1", 1, str), strict=True)
    assert [choice.text for choice in parsed.choices] == ["a", "b", "c", "d"]
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (12, 8)
