"""Compiles what a request asks for by llguidance, within bounds of time and memory, and explains what it refuses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from drafter.calls import Calls
from drafter.errors import RequestError
from drafter.methods.grammar.calls import calls_grammar
from drafter.methods.grammar.closing import closed
from drafter.methods.grammar.endings import ending
from drafter.methods.grammar.lark import as_lark_reads
from drafter.methods.grammar.places import Place, existing, places, pointer
from drafter.methods.grammar.schemas import checked_schema, refusal
from drafter.structured_outputs import CallOutputs, StructuredOutputs

LIMITS = LLParserLimits(
    max_items_in_row=10_000,  # two for each optional property that may come next
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Bounds of time and memory; a state of the lexer takes 1 to 2 kB."""
_STACK = 512 * 2**20
"""Bytes of address space: llguidance follows `$ref`s by recursion without a bound, 27 kB for each."""
_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""JSON on one line, as `json.dumps` writes it: free spacing would be a choice at every comma, and endless for some
models. Without escapes by number, under which a property's name could be written a second time as another one."""
_MOST_TRIES = 200
"""Places of a schema that are compiled alone to find which one is refused."""

_LARK_SKIPPED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')
_LARK_REFUSED = re.compile(r"%llguidance|%json|\b(?:max_tokens|temperature|stop)(?=\s*=)|@\w+")


def compiled(asked: StructuredOutputs, tokenizer: LLTokenizer, added: Mapping[str, int]) -> LLMatcher:
    """Return the state at the beginning of an output; raise `RequestError` for what cannot be compiled.

    `added` are the tokens that no text of a grammar matches, by their text.
    """
    schema: Any = None
    match asked.kind:
        case "json":
            schema = _read(asked.json)
            grammar = _by_schema(schema)
        case "json_object":
            grammar = _by_schema({"type": "object"})
        case "regex":
            grammar = LLMatcher.grammar_from_regex(asked.regex or "")
        case "choice":
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in asked.choice))
        case "calls":
            grammar = LLMatcher.grammar_from_lark(calls_grammar(_calls(asked), added, _embedded))
        case _:
            grammar = LLMatcher.grammar_from_lark(_read_grammar(asked.grammar or ""))
    matcher, place = _on_deep_stack(grammar, tokenizer, schema)
    if matcher.is_error():
        if asked.kind == "calls":  # the schema that is to blame has an error of its own, with its place
            calls_grammar(_calls(asked), added, partial(_alone, tokenizer=tokenizer))
        reason = _reason(matcher.get_error())
        if place is None:
            raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {reason}")
        raise refusal(existing(place, json.loads(asked.json)), reason)
    return matcher


def _on_deep_stack(grammar: str, tokenizer: LLTokenizer, schema: Any) -> tuple[LLMatcher, Place | None]:
    """Compile in a thread of its own, where a long chain of `$ref`s does not end the process."""
    found: list[tuple[LLMatcher, Place | None]] = []

    def work() -> None:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # what cannot begin, such as a schema that is only itself, becomes an error
        refused = schema is not None and matcher.is_error()
        found.append((matcher, _refused_place(schema, _reason(matcher.get_error())) if refused else None))

    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=work, name="grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0]


def _refused_place(schema: Any, reason: str) -> Place:
    """Return the deepest place of a schema, among the first ones, that is refused by itself for the same reason."""
    found: Place = ()
    for place in places(schema)[1:_MOST_TRIES]:
        if place[: len(found)] == found:
            # `$ref`s in it still lead into the whole.
            alone = {"$defs": {"whole": {"$id": "urn:whole", **schema}}, "$ref": "urn:whole" + pointer(place)}
            message = LLMatcher.validate_grammar(_by_schema(alone), limits=LIMITS)
            if message and _reason(message) == reason:
                found = place
    return found


def _by_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_STYLE)


def _calls(asked: StructuredOutputs) -> Calls:
    assert isinstance(asked, CallOutputs)
    assert asked.calls is not None
    return asked.calls


def _read(schema: str) -> Any:
    given = json.loads(schema)
    checked_schema(given)
    return checked_schema(closed(given))


def _embedded(schema: str) -> str:
    checked = _read(schema)
    if ending(json.loads(schema)) is not None:
        raise refusal((), "uniqueItems and a fractional multipleOf are not supported in arguments: remove them")
    return json.dumps((checked if isinstance(checked, dict) else {"anyOf": [checked]}) | {"x-guidance": _STYLE})


def _alone(schema: str, tokenizer: LLTokenizer) -> str:
    compiled(StructuredOutputs(json=schema), tokenizer, {})
    return schema


def _read_grammar(grammar: str) -> str:
    """Refuse options of the parser: some keep it from going back, which a draft tree needs; others are not checked."""
    if found := _LARK_REFUSED.search(_LARK_SKIPPED.sub(" ", grammar)):
        raise RequestError(f"structured_outputs.grammar cannot be used: {found.group()} is not supported: remove it")
    try:
        return as_lark_reads(grammar, LIMITS)
    except ValueError as error:
        raise RequestError(f"structured_outputs.grammar cannot be used: {error}") from error


def _reason(message: str) -> str:
    """Return what llguidance's message, of several lines with a drawing, says is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[0].startswith("panic") or "too big" in lines[0] or lines[0] == "schema too large":
        return "it becomes too large when it is compiled: make it smaller"
    if lines[0].startswith("NoExtension"):
        return "no output can begin: look for a part that only refers to itself"
    if lines[0].startswith("Unable to determine if regex is empty"):
        return "what its regular expressions and lengths have in common is too much to compile: use fewer of them"
    if lines[0] == "Unsatisfiable schema: schema is false":
        return "nothing is allowed there: look for bounds without a number between them, and for false"
    if errors := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        expression = re.search(r'invalid regex "(.*?)" \(in regex\)', lines[0])
        return f"{errors[0]}, in the regular expression{f' {expression[1][:80]}' if expression else ''}"
    return lines[0].removeprefix("Unsatisfiable schema: ").replace("json-schema:///", "")[:300]
