"""Reasoning before an answer: the marks around it, what a prompt says of it, and where an output ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
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
_MOST_READ = 256  # tokens at a prompt's end in which marks are looked for that are several tokens each


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


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts around a model's reasoning; the output begins `inside` it, or may begin with `begin`.

    Args:
        guided: The mark stands at the very beginning or there is no reasoning, as guides have it.
        exact: White space behind the reasoning is the answer's.
    """

    begin: str
    end: str
    inside: bool
    guided: bool = False
    exact: bool = False


class _Place(Enum):
    START = auto()  # it is not known yet whether there is reasoning
    REASONING = auto()
    BETWEEN = auto()  # only white space has come since the reasoning's end
    ANSWER = auto()


class ReasoningReader:
    """Parts a text at the first end of reasoning. Marks are in neither part, nor is white space after the reasoning."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._place = _Place.REASONING if marks.inside else _Place.START
        self._held = ""  # what may be part of a mark, or white space before one

    @property
    def reasons(self) -> bool:
        """True inside the reasoning."""
        return self._place is _Place.REASONING

    @property
    def answers(self) -> bool:
        """True once no mark can come."""
        return self._place in (_Place.BETWEEN, _Place.ANSWER)

    @property
    def waits(self) -> bool:
        """True until the answer's first character."""
        return self._place is not _Place.ANSWER

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take more text; return the reasoning and the answer as far as they are sure, all after the `last` piece."""
        begin, end = self._marks.begin, self._marks.end
        self._held += text
        reasoning = answer = ""
        if self._place is _Place.START:
            start = self._held if self._marks.guided else self._held.lstrip()
            if start.startswith(begin):
                self._place, self._held = _Place.REASONING, start.removeprefix(begin)
            elif last or self._marks.guided or not begin.startswith(start):
                self._place = _Place.ANSWER
        if self._place is _Place.REASONING:
            reasoning, mark, rest = self._held.partition(end)
            kept = 0 if mark or last else _begun(reasoning, end)
            reasoning, self._held = reasoning[: len(reasoning) - kept], rest or reasoning[len(reasoning) - kept :]
            if mark:
                self._place = _Place.ANSWER if self._marks.exact else _Place.BETWEEN
        if self._place is _Place.BETWEEN:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
