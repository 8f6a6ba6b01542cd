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

from llguidance import LLMatcher

from drafter.acceptance.guide import Guide, Guides
from drafter.errors import printable
from drafter.methods.grammar.compiling import compiled, trials
from drafter.methods.grammar.digits import Digits
from drafter.methods.grammar.endings import annotating, ending
from drafter.methods.grammar.guide import AfterReasoning, GrammarGuide, RecordGuide
from drafter.methods.grammar.spelling import Spelling
from drafter.structured_outputs import CallOutputs, StructuredOutputs
from drafter.text.reasoning import Reasoning

logger = logging.getLogger(__name__)

_Key = tuple[str, StructuredOutputs]
"""A salt, and what is asked for: nobody can find out by the time it takes whether another one has asked for it."""
_KEPT = 8
"""Compiled grammars: an automaton takes some MB, and 70 MB once it has grown to its limit, so that these take 560."""


_LATE = ('"format"', '"uniqueItems"', '"multipleOf"')
_MOST_SAID = 200  # characters of a line of the log about what somebody has asked for


@lru_cache(maxsize=256)
def _say_left(salt: str, forms: tuple[str, ...]) -> None:
    """Say what is not checked, once for each salt."""
    names = printable(", ".join(map(repr, forms)))
    logger.warning("format %s only annotates: texts of it are not checked", names[:_MOST_SAID])


def _before_json(asked: StructuredOutputs) -> bytes | None:
    """Return what stands before JSON, nothing where it is all of an output; None without JSON that can be told."""
    if not isinstance(asked, CallOutputs) or asked.calls is None:
        return b"" if asked.kind in ("json", "json_object") else None
    if asked.calls.otherwise != "":
        return b""
    return None if asked.calls.form.bare else asked.calls.form.marker.encode()


class Grammars(Guides):
    """Guides for a model with a fast tokeniser of `vocabulary` tokens; the ones in `eos` end its output."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._hf_tokenizer, self._eos, self._reasoning = tokenizer, frozenset(eos), Reasoning.of(tokenizer)
        spelling = Spelling(tokenizer, vocabulary, eos)
        self._tokenizer = spelling.made()
        self._kept: OrderedDict[_Key, Future[LLMatcher]] = OrderedDict()
        self._added = {text: token for token, text in spelling.added.items() if token not in eos}
        self._digits = Digits(lambda token: self._tokenizer.decode_bytes([token]), vocabulary)
        self._lock = Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        guide: Guide = GrammarGuide(self._beginning((salt, asked)), self._eos)
        if (begin := _before_json(asked)) is not None:
            guide = RecordGuide(guide, self._digits, self._eos, self._ending(asked, salt), begin)
        inside = False if self._reasoning is None else self._reasoning.begun(prompt, self._hf_tokenizer)
        if self._reasoning is None or self._reasoning.begin is None or inside is False:
            return guide
        return AfterReasoning(guide, self._reasoning, self._eos, inside=inside is True)

    def _ending(self, asked: StructuredOutputs, salt: str) -> Callable[[Sequence[int]], bool] | None:
        """Return what tells of the tokens of a record whether it is valid by what a grammar cannot follow."""
        text = asked.json or ""
        schema = json.loads(text) if any(name in text for name in _LATE) else True
        if left := annotating(schema):
            _say_left(salt, tuple(sorted(left)))
        holds = ending(schema)
        return None if holds is None else lambda tokens: holds(self._tokenizer.decode_bytes(list(tokens)).decode())

    def _beginning(self, key: _Key) -> LLMatcher:
        """Return a state of its own. All share an automaton, which may grow to its limit and is then of no more use."""
        matcher = self._compiled(key).deep_copy()
        matcher.compute_bitmask()
        if not matcher.is_error():
            return matcher
        self._forget(key)
        return self._compiled(key).deep_copy()

    def _forget(self, key: _Key) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def ready(self, asked: StructuredOutputs, salt: str = "") -> bool:
        found = self._kept.get((salt, asked))
        return found is not None and found.done()

    def stop(self) -> None:
        trials().stop()

    def spent(self) -> float:
        return super().spent() + trials().seconds

    def _compiled(self, key: _Key) -> LLMatcher:
        """Compile what is new: once, however many threads ask, while those that ask for something else go on."""
        with self._lock:
            known = key in self._kept
            matcher = self._kept.setdefault(key, Future())
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if not known:
            try:
                matcher.set_result(compiled(key[1], self._tokenizer, self._added))
            except BaseException as error:
                self._forget(key)
                matcher.set_exception(error)
        return matcher.result()
