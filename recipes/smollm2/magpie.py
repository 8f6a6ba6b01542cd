"""Questions that an instruct model writes itself, as in Magpie (Xu et al. 2024, arXiv 2406.08464).

Given the chat template's text up to where a user's message begins, the model goes on with a user's message. Sampled
often enough, these are prompts of the kind that it was tuned on, without any data set. Not all of them are of use:
`choose` leaves out what is cut off, too short or too long, not English text, or nearly a repeat.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from drafter.text.chat import render_chat

SHORTEST, LONGEST = 4, 150
"""Tokens of a question that is used."""
_NEARLY = 0.5
"""Two questions that share this part of their pairs of neighbouring words are repeats of each other."""
_ENGLISH = """
the a an of to and in is are for with that this it i you my your me what how why who which can could would do does if on
be have has as from write create give explain describe between about
"""
"""Words that nearly every English request has some of."""
_ENGLISH_WORDS = frozenset(_ENGLISH.split())
_SENTINEL = "\N{WHITE SQUARE}"


def opening(tokenizer: Any, system: str | None) -> str:
    """Return the chat template's text up to where the user's message begins.

    Args:
        tokenizer: Has the chat template.
        system: The system message; None leaves it to the template.
    """
    messages = [{"role": "user", "content": _SENTINEL}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return render_chat(tokenizer, messages).text.partition(_SENTINEL)[0]


def choose(rows: Iterable[dict[str, Any]], known: Sequence[str]) -> list[str]:
    """Return the questions that are of use, in order.

    Args:
        rows: Rows of `drafter generate`: `text`, `finish_reason` and `num_output_tokens` of each.
        known: Questions that must not be repeated: earlier ones, and those that are measured on.
    """
    repeats = Repeats()
    for question in known:
        repeats.add(question)
    chosen = []
    for row in rows:
        question = row["text"].strip()
        complete = row["finish_reason"] == "stop" and SHORTEST <= row["num_output_tokens"] - 1 <= LONGEST
        if complete and is_english(question) and not repeats.has(question):
            repeats.add(question)
            chosen.append(question)
    return chosen


def is_english(text: str) -> bool:
    """Return whether a text looks like English, or like code with an English request.

    Such a text begins with a letter, a digit or a quotation mark, has few characters beyond ASCII and no special
    tokens, and its words are long enough, and common enough, to be words.
    """
    words = _words(text)
    if not words or not re.match(r"[A-Za-z0-9\"'“‘]", text) or "<|" in text:
        return False
    ascii_share = sum(character.isascii() for character in text) / len(text)
    common = sum(word in _ENGLISH_WORDS for word in words) / len(words)
    return ascii_share >= 0.97 and common >= 0.15


class Repeats:
    """Finds texts that share most of their pairs of neighbouring words with an earlier one (Jaccard similarity)."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: defaultdict[tuple[str, str], list[int]] = defaultdict(list)

    def add(self, text: str) -> None:
        """Remember a text."""
        pairs = _pairs(text)
        for pair in pairs:
            self._holders[pair].append(len(self._sizes))
        self._sizes.append(len(pairs))

    def has(self, text: str) -> bool:
        """Return whether a text is remembered, or one that is nearly the same."""
        pairs = _pairs(text)
        shared = Counter(number for pair in pairs for number in self._holders.get(pair, ()))
        return any(count >= _NEARLY * (len(pairs) + self._sizes[n] - count) for n, count in shared.items())


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def _pairs(text: str) -> set[tuple[str, str]]:
    words = ["", *_words(text)]
    return set(pairwise(words))
