"""Compiles what a request asks for by llguidance, within bounds of time and memory, and explains what it refuses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from drafter.calls import Calls
from drafter.confined import BoundError, Bounds, Confined
from drafter.errors import RequestError, one_line
from drafter.methods.grammar.calls import calls_grammar
from drafter.methods.grammar.closing import closed
from drafter.methods.grammar.endings import ending
from drafter.methods.grammar.lark import as_lark_reads
from drafter.methods.grammar.places import Place, existing, mapped, places, pointer
from drafter.methods.grammar.schemas import checked_schema, refusal
from drafter.structured_outputs import CallOutputs, StructuredOutputs

Result = TypeVar("Result")


def _limits(items: int) -> LLParserLimits:
    """Return bounds of time and memory; a state of the lexer takes 1 to 2 kB, and a step works on so many items."""
    return LLParserLimits(
        max_items_in_row=min(items, 10_000),
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=items,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


LIMITS = _limits(12_000)
"""For schemas: two items for each optional property that may come next."""
_LARK_LIMITS = _limits(1_000)
"""For grammars of anybody's: of an ambiguous one such as `x: x x | "a"` each item takes time by the length of the text,
and a step of 12,000 would take the engine's thread fifth parts of seconds. Others have tens of items."""
MOST_FORCED = 1 << 14
"""Bytes that a grammar may leave no choice about at once: llguidance passes all of them to find the next token."""
TOO_MUCH_FORCED = f"it leaves no choice for more than {MOST_FORCED:,} bytes at once: make the text shorter"
_STACK = 512 << 20  # bytes of address space: llguidance follows `$ref`s by recursion without a bound, 27 kB for each
_STARTING = threading.Lock()
_BOUNDS = Bounds(memory=_STACK + (256 << 20), seconds=2.0)
"""A thread's allocator reserves 128 MiB of the address space. Of the rest, the largest that compile take a third."""
_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""JSON on one line, as `json.dumps` writes it: free spacing would be a choice at every comma, and endless for some
models. Without escapes by number, under which a property's name could be written a second time as another one."""
_STEPS, _BRANCHES, _CLOSING = 8, 24, b'",]}'
"""Choices in which a trial looks for long forced texts, bytes that it tries at each, and those that it prefers."""
_MOST_TRIES = 200  # places of a schema that are compiled alone to find which one is refused

_LARK_SKIPPED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')
_LARK_REFUSED = re.compile(r"%llguidance|%json|\b(?:max_tokens|temperature|stop)(?=\s*=)|@\w+")
_PLACE_IN_JSON = re.compile(r" at line \d+ column \d+$")  # of a schema as it is written here, which nobody else sees


def compiled(asked: StructuredOutputs, tokenizer: LLTokenizer, added: Mapping[str, int]) -> LLMatcher:
    """Return the state at the beginning of an output; raise `RequestError` for what cannot be compiled.

    It is compiled in a process of its own first, within limits: what takes long there, or ends it, costs nobody else
    anything. Here it takes as much time again, and other threads go on.

    Args:
        added: The tokens that no text of a grammar matches, by their text.
    """
    try:
        grammar: str = trials().run(asked, dict(added), tokenizer.vocab_size, bounds=_BOUNDS)
    except BoundError as error:
        why = f"{error} when it is compiled: make it smaller"
        raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {why}") from error
    matcher = on_deep_stack(lambda: _begun(grammar, tokenizer, asked.kind))
    if matcher.is_error():
        raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {_reason(matcher.get_error())}")
    return matcher


@cache
def trials() -> Confined:
    """Return the processes of this one in which grammars are compiled for the first time."""
    return Confined(_trial)


def _trial() -> Callable[..., str]:
    return lambda *arguments: on_deep_stack(lambda: _tried(*arguments))


def _tried(asked: StructuredOutputs, added: Mapping[str, int], vocabulary: int) -> str:
    """Return the grammar of an output, which llguidance can compile, or raise `RequestError`."""
    try:
        return _compilable(asked, added, vocabulary)
    except (RequestError, MemoryError):  # the latter is a limit's
        raise
    except Exception as error:  # llguidance's readers have limits of their own, on nesting and on numbers, for example
        why = _PLACE_IN_JSON.sub("", one_line(error, 200))
        refused = f"structured_outputs.{asked.kind} cannot be used: {why}: change that part, or leave it out"
        raise RequestError(refused) from error


def _compilable(asked: StructuredOutputs, added: Mapping[str, int], vocabulary: int) -> str:
    schema = _read(asked.json) if asked.kind == "json" else None
    grammar = _grammar(asked, schema, added)
    matcher = _begun(grammar, _bytes(tuple(added.items()), vocabulary), asked.kind)
    if not matcher.is_error():
        texts = [*asked.choice, *_constants(schema)]
        if max([_most_forced(matcher, vocabulary), *(len(text.encode()) for text in texts)]) <= MOST_FORCED:
            return grammar
        raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {TOO_MUCH_FORCED}")
    reason = _reason(matcher.get_error())
    if asked.kind == "json":
        raise refusal(existing(_refused_place(schema, reason), json.loads(asked.json)), reason)
    if asked.kind == "calls":  # the schema that is to blame has an error of its own, with its place
        calls_grammar(_calls(asked), added, partial(_alone, vocabulary=vocabulary))
    raise RequestError(f"structured_outputs.{asked.kind} cannot be used: {reason}")


def _constants(schema: Any) -> list[str]:
    """Return the texts of a schema that stand in an output as they are."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    found = [json.dumps(one, ensure_ascii=False) for one in values] + list(schema.get("properties", ()))
    mapped(schema, lambda _, inner: found.extend(_constants(inner)))
    return found


def _most_forced(matcher: LLMatcher, first: int) -> int:
    """Return the most bytes that are forced at once, as far as a few steps tell; `first` is the token of byte 0.

    A grammar may hide gigabytes behind a choice. Each step looks at several, and goes where the most are forced.
    """
    most = 0
    for _ in range(_STEPS):
        most = max(most, len(matcher.compute_ff_bytes()))
        matcher.consume_tokens(matcher.compute_ff_tokens())
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") >> first
        found = []
        for byte in [one for one in range(256) if allowed >> one & 1][:_BRANCHES]:
            after = matcher.deep_copy()
            if after.consume_token(first + byte):
                found.append((len(after.compute_ff_bytes()), byte in _CLOSING, byte, after))
        if most > MOST_FORCED or not found:
            break
        *_, matcher = max(found)  # the last but one of each is another byte
    return most


class _Bytes:
    """The vocabulary of a trial, in the form of llguidance's `TokenizerWrapper`: added tokens, and all bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, added: Iterable[tuple[str, int]], vocabulary: int) -> None:
        self.tokens = [b""] * vocabulary + [bytes([one]) for one in range(256)] + [b"<end>"]
        self._first, self.eos_token_id = vocabulary, len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]
        for text, token in added:
            self.tokens[token] = text.encode()
            self.special_token_ids.append(token)

    def __call__(self, text: str) -> list[int]:
        return [self._first + one for one in text.encode()]


@lru_cache(maxsize=1)
def _bytes(added: tuple[tuple[str, int], ...], vocabulary: int) -> LLTokenizer:
    return LLTokenizer(_Bytes(added, vocabulary), slices=[])  # type: ignore[arg-type]


def _grammar(asked: StructuredOutputs, schema: Any, added: Mapping[str, int]) -> str:
    match asked.kind:
        case "json":
            return _by_schema(schema)
        case "json_object":
            return _by_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(asked.regex or "")
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in asked.choice))
        case "calls":
            return LLMatcher.grammar_from_lark(calls_grammar(_calls(asked), added, _embedded))
    return LLMatcher.grammar_from_lark(_read_grammar(asked.grammar or ""))


def _begun(grammar: str, tokenizer: LLTokenizer, kind: str | None) -> LLMatcher:
    limits = _LARK_LIMITS if kind == "grammar" else LIMITS
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # what cannot begin, such as a schema that is only itself, becomes an error
    return matcher


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """Do work in a thread where a long chain of `$ref`s does not end the process. There is one: pieces wait for it."""
    with _STARTING:
        thread = _deep_thread()
    return thread.submit(work).result()


@cache
def _deep_thread() -> ThreadPoolExecutor:
    """Start the thread, once in a process: the size is that of all threads that are started meanwhile."""
    before = threading.stack_size(_STACK)
    try:
        thread = ThreadPoolExecutor(1, "grammar")
        thread.submit(int).result()
    finally:
        threading.stack_size(before)
    return thread


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


def _alone(schema: str, vocabulary: int) -> str:
    _tried(StructuredOutputs(json=schema), {}, vocabulary)
    return schema


def _read_grammar(grammar: str) -> str:
    """Refuse options of the parser: some keep it from going back, which a draft tree needs; others are not checked."""
    if found := _LARK_REFUSED.search(_LARK_SKIPPED.sub(" ", grammar)):
        raise RequestError(f"structured_outputs.grammar cannot be used: {found.group()} is not supported: remove it")
    try:
        return as_lark_reads(grammar, _LARK_LIMITS)
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
