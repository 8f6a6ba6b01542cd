"""Compiles what requests ask for, by llguidance, and makes a guide for each of them."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import lru_cache
from threading import Lock
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLTokenizer

from drafter.acceptance.guide import Guide, Guides
from drafter.errors import RequestError, first_line, printable
from drafter.methods.grammar.compiling import compiled
from drafter.methods.grammar.digits import Digits
from drafter.methods.grammar.endings import annotating, ending
from drafter.methods.grammar.guide import GrammarGuide
from drafter.methods.grammar.reasoning import AfterReasoning
from drafter.methods.grammar.record import RecordGuide
from drafter.structured_outputs import StructuredOutputs
from drafter.text.reasoning import Reasoning

logger = logging.getLogger(__name__)

_KEPT = 32
"""Compiled grammars: a few MB each, and 90 MB for one whose automaton has grown to its limit."""


_LATE = ('"format"', '"uniqueItems"', '"multipleOf"')


@lru_cache(maxsize=256)
def _say_left(form: str) -> None:
    logger.warning("format %r only annotates: texts of it are not checked", printable(form)[:80])


class Grammars(Guides):
    """Guides for a model with a fast tokeniser of `vocabulary` tokens; the ones in `eos` end its output."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._hf_tokenizer, self._eos, self._reasoning = tokenizer, frozenset(eos), Reasoning.of(tokenizer)
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(eos))
        except Exception as error:  # its Rust code raises what it likes
            raise RequestError(
                f"structured_outputs need a tokeniser that llguidance can read: {first_line(error)}"
            ) from error
        self._kept: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        added = {entry.content: token for token, entry in tokenizer.added_tokens_decoder.items() if token < vocabulary}
        self._added = {
            text: token for text, token in added.items() if token not in eos and self._tokenizer.is_special_token(token)
        }
        self._digits = Digits(lambda token: self._tokenizer.decode_bytes([token]), vocabulary)
        self._lock = Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int]) -> Guide:
        guide: Guide = GrammarGuide(self._beginning(asked), self._eos)
        if asked.kind in ("json", "json_object"):
            guide = RecordGuide(guide, self._digits, self._eos, self._ending(asked))
        inside = False if self._reasoning is None else self._reasoning.begun(prompt, self._hf_tokenizer)
        if self._reasoning is None or inside is False:
            return guide
        return AfterReasoning(guide, self._reasoning, self._eos, inside=inside is True)

    def _ending(self, asked: StructuredOutputs) -> Callable[[Sequence[int]], bool] | None:
        """Return what tells of the tokens of a record whether it is valid by what a grammar cannot follow."""
        text = asked.json or ""
        schema = json.loads(text) if any(name in text for name in _LATE) else True
        for form in annotating(schema):
            _say_left(form)
        holds = ending(schema)
        return None if holds is None else lambda tokens: holds(self._tokenizer.decode_bytes(list(tokens)).decode())

    def _beginning(self, asked: StructuredOutputs) -> LLMatcher:
        """Return a state of its own. All share an automaton, which may grow to its limit and is then of no more use."""
        matcher = self._compiled(asked).deep_copy()
        matcher.compute_bitmask()
        if not matcher.is_error():
            return matcher
        self._forget(asked)
        return self._compiled(asked).deep_copy()

    def _forget(self, asked: StructuredOutputs) -> None:
        with self._lock:
            self._kept.pop(asked, None)

    def ready(self, asked: StructuredOutputs) -> bool:
        found = self._kept.get(asked)
        return found is not None and found.done()

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
                matcher.set_result(compiled(asked, self._tokenizer, self._added))
            except BaseException as error:
                self._forget(asked)
                matcher.set_exception(error)
        return matcher.result()
