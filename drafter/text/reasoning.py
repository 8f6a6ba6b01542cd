"""Reasoning before an answer: the marks around it, and what a prompt says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from drafter.text.tokenizers import special_texts

_PAIRS = (
    ("<think>", "</think>"),  # Qwen 3, DeepSeek R1 and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<thinking>", "</thinking>"),
)
_MOST_READ = 256
"""Tokens at a prompt's end in which marks are looked for that are several tokens each."""


@dataclass(frozen=True)
class Reasoning:
    """The tokens that begin and end a model's reasoning, and their texts; None where these are several tokens each."""

    begin: int | None
    end: int | None
    begin_text: str
    end_text: str

    @classmethod
    def of(cls, tokenizer: Any) -> Reasoning | None:
        """Return the marks that are both in a tokeniser's vocabulary, or in its chat template.

        None for a model that does not reason so.
        """
        return _reasoning_of(tokenizer)

    def begun(self, prompt: Sequence[int], tokenizer: Any) -> bool | None:
        """Return whether the output begins inside the reasoning; None if the model may begin with it or without.

        Templates begin it for models that always reason, and end with an empty one where it is switched off. A mark
        before another special token is of an earlier turn, or of what somebody has said.
        """
        special, after = special_texts(tokenizer), list[int]()
        for token in islice(reversed(prompt), None if self.begin is not None else _MOST_READ):
            if token == self.begin:
                return True
            if token == self.end:
                return None if str(tokenizer.decode(after[::-1])).strip() else False
            if token in special:
                break
            after.append(token)
        if self.begin is not None:
            return None
        text = str(tokenizer.decode(after[::-1]))
        begun, ended = text.rfind(self.begin_text), text.rfind(self.end_text)
        if begun > ended:
            return True
        return None if ended < 0 or text[ended + len(self.end_text) :].strip() else False


@lru_cache(maxsize=4)
def _reasoning_of(tokenizer: Any) -> Reasoning | None:
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    for begin, end in _PAIRS:
        if begin in vocabulary and end in vocabulary:
            return Reasoning(vocabulary[begin], vocabulary[end], begin, end)
    template = str(getattr(tokenizer, "chat_template", None))
    return next((Reasoning(None, None, *pair) for pair in _PAIRS if all(one in template for one in pair)), None)
