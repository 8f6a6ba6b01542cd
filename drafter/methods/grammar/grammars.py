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
from drafter.methods.grammar.calls import calls_grammar
from drafter.methods.grammar.guide import GrammarGuide
from drafter.methods.grammar.schemas import checked_schema
from drafter.structured_outputs import StructuredOutputs

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
        self._eos = frozenset(eos)
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(eos))
        except Exception as error:  # its Rust code raises what it likes
            raise RequestError(
                f"structured_outputs need a tokeniser that llguidance can read: {first_line(error)}"
            ) from error
        added = {entry.content: token for token, entry in tokenizer.added_tokens_decoder.items() if token < vocabulary}
        self._added = {
            text: token for text, token in added.items() if token not in eos and self._tokenizer.is_special_token(token)
        }
        self._kept: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int]) -> Guide:
        return GrammarGuide(self._compiled(asked).deep_copy(), self._eos)

    def ready(self, asked: StructuredOutputs) -> bool:
        return asked in self._kept

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
        if asked.calls is not None:
            grammar = LLMatcher.grammar_from_lark(calls_grammar(asked.calls, self._added, _embedded))
        else:
            grammar = _grammar(asked)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            if asked.calls is not None:  # the schema that is to blame has an error of its own, with its place
                calls_grammar(asked.calls, self._added, self._alone)
            raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {matcher.get_error().splitlines()[0]}")
        return matcher

    def _alone(self, schema: str) -> str:
        self._compile(StructuredOutputs(json=schema))
        return schema


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


def _embedded(schema: str) -> str:
    checked = checked_schema(json.loads(schema))
    return json.dumps((checked if isinstance(checked, dict) else {"anyOf": [checked]}) | {"x-guidance": _SPACING})
