"""Reasoning apart from the answer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import Generation, TokenDelta
from drafter.statistics import DecodeCounts
from drafter.text.conversation import Conversation
from pipeline.openai.answers import Chunks, response
from pipeline.openai.reasoning import ReasoningMarks, ReasoningReader
from pipeline.openai.requests import ParsedRequest

TEXTS = [
    ("<think>hm</think>\n\n{} ", False, "hm", "{} "),
    (" <think>hm <b</think>{</think>}", False, "hm <b", "{</think>}"),
    ("hm</think> yes", True, "hm", "yes"),
    ("hm", True, "hm", ""),
    ("<think>hm</thi", False, "hm</thi", ""),
    ("<think>", False, "", ""),
    (" <thin", False, "", " <thin"),
    ("{} <think>x</think>", False, "", "{} <think>x</think>"),
    ("</think>{}", True, "", "{}"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), TEXTS)
def test_a_text_is_parted_at_the_end_of_the_reasoning(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert ReasoningReader(ReasoningMarks("<think>", "</think>", inside)).push(text, last=True) == (reasoning, answer)


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 30)))
def test_pieces_give_what_the_whole_gives(case: tuple[str, bool, str, str], cuts: list[int]) -> None:
    text, inside, *expected = case
    reader = ReasoningReader(ReasoningMarks("<think>", "</think>", inside))
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [reader.push(text[start:stop]) for start, stop in itertools.pairwise(borders)]
    parts.append(reader.push("", last=True))
    assert ["".join(one) for one in zip(*parts, strict=True)] == expected


REQUEST = ParsedRequest(
    "gpt",
    (Conversation([{"role": "user", "content": "x"}]),),
    {},
    reasoning=ReasoningMarks("<think>", "</think>", inside=False),
)
TEXT = "<think>hm</think>\n\n{}"


def made(text: str) -> Generation:
    return Generation("", [5], text, "stop", 3, DecodeCounts())


def test_an_answer_has_its_reasoning_beside_its_content() -> None:
    message = response(REQUEST, [made(TEXT)], "chatcmpl-1", 1, str)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("{}", "hm")
    message = response(REQUEST, [made("{}")], "chatcmpl-1", 1, str)["choices"][0]["message"]
    assert message["content"] == "{}"
    assert "reasoning_content" not in message


@pytest.mark.parametrize("size", [1, 4, 40])
def test_a_stream_has_what_the_whole_answer_has(size: int) -> None:
    chunks = Chunks(REQUEST, "chatcmpl-1", 1, str, speculation=False)
    events = "".join(
        chunks.step(0, TokenDelta([5], TEXT[start : start + size], 0)) for start in range(0, len(TEXT), size)
    ) + chunks.finish(0, made(TEXT))
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in events.splitlines() if line]
    assert deltas[0]["role"] == "assistant"
    assert "".join(one.get("content") or "" for one in deltas) == "{}"
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == "hm"
