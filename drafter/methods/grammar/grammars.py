"""Compiles what requests ask for, by llguidance, and makes a guide for each of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from drafter.acceptance.guide import Guide, Guides
from drafter.errors import RequestError, first_line
from drafter.methods.grammar.guide import GrammarGuide
from drafter.methods.grammar.reasoning import AfterReasoning
from drafter.methods.grammar.schemas import checked_schema
from drafter.structured_outputs import StructuredOutputs
from drafter.text.reasoning import Reasoning

_KEPT = 64
"""Compiled grammars."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Bounds of time and memory; a state of the lexer takes 1 to 2 kB."""
_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as `json.dumps` writes it: free spacing would be a choice at every comma, and endless for some
models."""


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
        self._kept: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int]) -> Guide:
        guide = GrammarGuide(self._compiled(asked).deep_copy(), self._eos)
        inside = False if self._reasoning is None else self._reasoning.begun(prompt, self._hf_tokenizer)
        if self._reasoning is None or inside is False:
            return guide
        return AfterReasoning(guide, self._reasoning, self._eos, inside=inside is True)

    def _compiled(self, asked: StructuredOutputs) -> LLMatcher:
        with self._lock:
            if (found := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
                return found
        made = self._compile(asked)
        with self._lock:
            self._kept[asked] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, asked: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _grammar(asked), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {matcher.get_error().splitlines()[0]}")
        return matcher


def _grammar(asked: StructuredOutputs) -> str:
    match asked.kind:
        case "json":
            return _by_schema(checked_schema(json.loads(asked.json)))
        case "json_object":
            return _by_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(asked.regex or "")
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in asked.choice))
        case _:
            return LLMatcher.grammar_from_lark(asked.grammar or "")


def _by_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SPACING)
