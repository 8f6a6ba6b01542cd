"""Guides by a rule that says what may follow an output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Event

import pytest
from torch import Tensor

from drafter.acceptance.guide import Guide, Guides, PutOff
from drafter.structured_outputs import StructuredOutputs
from tests.support.waiting import PATIENCE

Rule = Callable[[tuple[int, ...]], Collection[int]]
"""The tokens that may follow an output."""


class RuleGuide(Guide):
    """An output that a rule allows; `eos` ends it. What a rule leaves no choice about is forced."""

    def __init__(self, rule: Rule, vocabulary: int, eos: int) -> None:
        self.rule, self.vocabulary, self.eos = rule, vocabulary, eos
        self.output: list[int] = []

    @property
    def _next(self) -> set[int]:
        if self.eos in self.output:
            return set()
        return {token for token in self.rule(tuple(self.output)) if 0 <= token < self.vocabulary}

    def consume(self, token: int) -> bool:
        if token not in self._next:
            return False
        self.output.append(token)
        return True

    def rewind(self, count: int) -> None:
        assert 0 <= count <= len(self.output)
        del self.output[len(self.output) - count :]

    def forced(self) -> Sequence[int]:
        run = list[int]()
        while len(following := self._next) == 1:
            run += following
            self.output += following
        self.rewind(len(run))
        return run

    @property
    def ended(self) -> bool:
        return self.eos in self.output

    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        words = [0] * len(mask)
        for token in self._next:
            words[token // 32] |= 1 << token % 32
        for place, word in enumerate(words):
            mask[place] = word - (1 << 32) if word >= 1 << 31 else word


class RuleGuides(Guides):
    """The same rule for all requests."""

    def __init__(self, rule: Rule, vocabulary: int, eos: int) -> None:
        self.made: list[RuleGuide] = []
        self._settings = rule, vocabulary, eos

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        self.made.append(RuleGuide(*self._settings))
        return self.made[-1]


def hold_new(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Let guides for what nobody has asked for before take their time.

    Returns:
        What is set when one is being made, and what lets it and later ones go on.
    """
    begun, may_go_on = Event(), Event()
    guide, ready = guides.guide, guides.ready

    def slowly(asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        if not ready(asked, salt):
            begun.set()
            assert may_go_on.wait(PATIENCE)
        return guide(asked, prompt, salt)

    monkeypatch.setattr(guides, "guide", slowly)
    return begun, may_go_on
