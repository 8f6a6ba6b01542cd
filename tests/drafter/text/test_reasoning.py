"""Reasoning apart from the answer, in texts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.text.reasoning import ReasoningMarks, ReasoningReader

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
