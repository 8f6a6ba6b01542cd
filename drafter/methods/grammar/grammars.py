"""Compiles what requests ask for, by llguidance, and makes a guide for each of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLTokenizer

from drafter.acceptance.guide import Guide, Guides
from drafter.errors import RequestError, first_line
from drafter.methods.grammar.compiling import compiled
from drafter.methods.grammar.guide import GrammarGuide
from drafter.methods.grammar.reasoning import Markers
from drafter.structured_outputs import StructuredOutputs

_KEPT = 64
"""Compiled grammars. One takes up to a few MB, and its automaton grows with what is written by it, up to its limit."""


class Grammars(Guides):
    """Guides for a model with a fast tokeniser of `vocabulary` tokens; the ones in `eos` end its output."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._hf_tokenizer, self._eos, self._markers = tokenizer, frozenset(eos), Markers.of(tokenizer)
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(eos))
        except Exception as error:  # its Rust code raises what it likes
            raise RequestError(
                f"structured_outputs need a tokeniser that llguidance can read: {first_line(error)}"
            ) from error
        self._kept: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int]) -> Guide:
        guide = GrammarGuide(self._compiled(asked).deep_copy(), self._eos)
        return guide if self._markers is None else self._markers.guide(guide, prompt, self._hf_tokenizer, self._eos)

    def _compiled(self, asked: StructuredOutputs) -> LLMatcher:
        """Compile what is new: once, however many threads ask, while those that ask for something else go on."""
        with self._lock:
            known = asked in self._kept
            matcher = self._kept.setdefault(asked, Future())
            self._kept.move_to_end(asked)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if not known:
            try:
                matcher.set_result(compiled(asked, self._tokenizer))
            except BaseException as error:
                matcher.set_exception(error)
        return matcher.result()
