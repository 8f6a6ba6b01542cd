"""Reasoning before an answer: the tokens around it, and what a prompt says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"))
"""Of Qwen 3, DeepSeek R1 and most others; of Magistral; of Seed-OSS; of Kimi."""


@dataclass(frozen=True)
class Reasoning:
    """The tokens that begin and end a model's reasoning, and their texts."""

    begin: int
    end: int
    begin_text: str
    end_text: str

    @classmethod
    def of(cls, tokenizer: Any) -> Reasoning | None:
        """Return those of a tokeniser that has both as single tokens; None for a model that does not reason so."""
        vocabulary = tokenizer.get_vocab()
        for begin, end in _PAIRS:
            if begin in vocabulary and end in vocabulary:
                return cls(vocabulary[begin], vocabulary[end], begin, end)
        return None

    def begun(self, prompt: Sequence[int], tokenizer: Any) -> bool | None:
        """Return whether the output begins inside the reasoning; None if the model may begin with it or without.

        Templates begin it for models that always reason, and end with an empty one where it is switched off.
        """
        last = {token: place for place, token in enumerate(prompt) if token in (self.begin, self.end)}
        begun, ended = last.get(self.begin, -1), last.get(self.end, -1)
        if begun > ended:
            return True
        if ended >= 0 and not tokenizer.decode(list(prompt[ended + 1 :])).strip():
            return False
        return None
