"""Which of the questions that a model writes itself become prompts."""

from __future__ import annotations

from typing import Any

import pytest

from drafter.embedded import EMBEDDED_BASE
from drafter.text.tokenizers import load_tokenizer
from recipes.smollm2.magpie import Repeats, choose, is_english, opening
from tests.support.gguf_files import TEMPLATE


def row(text: str, tokens: int = 20, reason: str = "stop") -> dict[str, Any]:
    return {"text": text, "num_output_tokens": tokens, "finish_reason": reason}


@pytest.mark.parametrize(
    ("system", "expected"),
    [(None, "<|im_start|>user\n"), ("Be brief.", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")],
)
def test_an_opening_ends_where_the_users_message_begins(system: str | None, expected: str) -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    tokenizer.chat_template = TEMPLATE
    assert opening(tokenizer, system) == expected


def test_questions_that_are_cut_off_or_of_the_wrong_length_are_left_out() -> None:
    rows = [
        row("What is the capital of France?", 8),
        row("Write a story about a dog that", 40, "length"),
        row("How are you?", 4),  # of which one is the end of the message
        row("Can you explain the history of the town in all of its detail?", 152),
    ]
    assert choose(rows, []) == ["What is the capital of France?"]


def test_of_questions_that_are_nearly_the_same_the_first_is_kept() -> None:
    first = "Can you provide a list of the top five cities to visit in Europe?"
    second = "Can you provide a list of the top ten cities to visit in Europe?"
    third = "Which cities in Europe are the best to visit?"
    assert choose([row(first), row(second), row(third), row(f" {first}\n")], []) == [first, third]


def test_known_questions_are_not_chosen_again() -> None:
    known = "Natalia sold clips to 48 of her friends in April. How many clips did she sell?"
    assert choose([row("natalia sold clips to 48 of her friends in april: how many clips did she sell")], [known]) == []


@pytest.mark.parametrize(
    "text",
    [
        "What is the difference between a list and a tuple?",
        "Write a function `add(a, b)` that returns the sum of a and b.\n```python\ndef add(a, b):\n    pass\n```",
        '"To be or not to be": who wrote this?',
    ],
)
def test_english_requests_are_recognised(text: str) -> None:
    assert is_english(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?!",
        "Was ist die Hauptstadt von Frankreich und wie viele Menschen wohnen dort?",
        "法国的首都是什么?",
        "- 3.5 9.1 2.2 0.4",
        "Sayap 12 soccer teams Delegad Crossroads Azruba Sibyl Etah",
        "What is this?<|im_start|>",
    ],
)
def test_other_texts_are_not(text: str) -> None:
    assert not is_english(text)


def test_repeats_are_found_by_the_share_of_equal_pairs_of_words() -> None:
    repeats = Repeats()
    repeats.add("a b c d")  # with the beginning, four pairs
    assert repeats.has("A, b, c, d!")
    assert repeats.has("a b c x")  # three of five
    assert not repeats.has("a b x y")  # two of six
    assert not repeats.has("d c b a")
