"""Answers parse with the client's own types, and say what was generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from drafter.embedded import EMBEDDED_BASE
from drafter.requests import Generation, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import load_tokenizer
from pipeline.openai.answers import (
    chat_logprobs,
    completion_logprobs,
    event,
    response,
    token_text,
)
from pipeline.openai.errors import OpenAIError, to_json
from pipeline.openai.requests import ParsedRequest


def generation(text: str, tokens: int, prompt: int, accepted: int, drafted: int) -> Generation:
    counts = DecodeCounts(num_accepted_draft_tokens=accepted, num_draft_tokens=drafted)
    return Generation("", list(range(tokens)), text, "stop", prompt, counts)


def test_a_chat_of_two_choices() -> None:
    request = ParsedRequest("gpt", (Conversation([{"role": "user", "content": "x"}]),), {}, n=2)
    made = [generation("a", 4, 10, 2, 9), generation("b", 3, 10, 1, 5)]
    made = [replace(one, num_cached_tokens=cached) for one, cached in zip(made, (8, 9), strict=True)]
    body = response(request, made, "chatcmpl-1", 1700000000, str)
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert [(choice.index, choice.message.content) for choice in parsed.choices] == [(0, "a"), (1, "b")]
    assert (parsed.id, parsed.created, parsed.model) == ("chatcmpl-1", 1700000000, "gpt")
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (10, 7, 17)
    details = parsed.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 11)
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 8  # of the prompt, which counts once


def test_a_completion_of_two_prompts_with_two_choices_each() -> None:
    request = ParsedRequest("davinci", ("x", "y"), {}, n=2)
    made = [generation(text, 2, prompt, 0, 0) for text, prompt in (("a", 5), ("b", 5), ("c", 7), ("d", 7))]
    parsed = Completion.model_validate(response(request, made, "cmpl-1", 1, str), strict=True)
    assert [choice.text for choice in parsed.choices] == ["a", "b", "c", "d"]
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (12, 8)


def test_tokens_make_the_text_that_they_are_of() -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    text = "Tom has 3 boxes of 12 pens, and more."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(token_text(tokenizer, token) for token in ids) == text
    euro = tokenizer("€", add_special_tokens=False)["input_ids"]
    assert "€" not in [token_text(tokenizer, token) for token in euro] or len(euro) == 1


def described(tokenizer: Any, ids: list[int]) -> list[dict[str, Any]]:
    told = chat_logprobs([TokenLogprob(token, -1.0, ((token, -1.0),)) for token in ids], partial(token_text, tokenizer))
    assert told is not None
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in told["content"])
    to_json(told)  # no bytes of half characters are in its texts
    found: list[dict[str, Any]] = told["content"]
    return found


def test_tokens_have_their_bytes_also_those_of_half_a_character() -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    text = "Käse für 3 € 🙂, ÿ\x7f"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    content = described(tokenizer, ids)
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
    assert any("\ufffd" in one["token"] for one in content)
    told = completion_logprobs([TokenLogprob(token, -1.0, ()) for token in ids], partial(token_text, tokenizer))
    to_json(told)


def test_bytes_of_sentencepieces_vocabularies_and_of_such_that_do_not_say() -> None:
    class Pieces:
        entries = ("▁a", "<0xE2>", "<0x82>", "?€")

        def decode(self, ids: list[int], **_: object) -> str:
            return "".join([" a", "\ufffd", "\ufffd", "\ufffd"][token] for token in ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return self.entries[token]

    found = described(Pieces(), [0, 1, 2, 3])
    assert [one["bytes"] for one in found] == [[32, 97], [0xE2], [0x82], None]
    assert [one["token"] for one in found] == [" a", "\ufffd", "\ufffd", "\ufffd"]


def test_tokens_of_tokenisers_that_put_words_together() -> None:
    class Joining:
        """Like SentencePiece's: the space before the first word is left out."""

        def decode(self, ids: list[int], **_: object) -> str:
            return " ".join(["", "one", "two"][token] for token in ids)

    assert [token_text(Joining(), token) for token in (1, 2)] == [" one", " two"]


@pytest.mark.parametrize("tell", [chat_logprobs, completion_logprobs])
def test_a_token_without_a_chance_has_openais_number_for_it(tell: Callable[..., dict[str, Any]]) -> None:
    told = to_json(tell([TokenLogprob(1, -math.inf, ((2, -0.5), (1, -math.inf)))], str))
    assert told.count("-9999.0") == 2


@pytest.mark.parametrize("tell", [chat_logprobs, completion_logprobs])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_no_answer(tell: Callable[..., dict[str, Any]], number: float) -> None:
    for wrong in (TokenLogprob(1, number, ()), TokenLogprob(1, -0.5, ((1, -0.5), (2, number)))):
        with pytest.raises(OpenAIError, match="not finite") as error:
            tell([wrong], str)
        assert error.value.status == 500


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_other_numbers(number: float) -> None:
    for write in (to_json, event):
        with pytest.raises(ValueError, match="JSON compliant"):
            write({"figures": [1.0, number]})


def test_log_probabilities() -> None:
    texts = {1: "a", 2: " bc", 3: "\ufffd"}
    made = [TokenLogprob(1, -0.5, ((2, -0.25), (1, -0.5))), TokenLogprob(2, -1.0, ()), TokenLogprob(3, -2.0, ())]
    chat = chat_logprobs(made, texts.__getitem__)
    assert chat is not None
    first, second, third = chat["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [(" bc", -0.25), ("a", -0.5)]
    assert (second["bytes"], second["top_logprobs"]) == ([32, 98, 99], [])
    assert third["bytes"] is None
    assert completion_logprobs(made, texts.__getitem__, offset=5) == {
        "tokens": ["a", " bc", "\ufffd"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{" bc": -0.25, "a": -0.5}, {}, {}],
        "text_offset": [5, 6, 9],
    }
    assert chat_logprobs(None, texts.__getitem__) is completion_logprobs(None, texts.__getitem__) is None
