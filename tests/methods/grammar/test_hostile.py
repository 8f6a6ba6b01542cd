"""Requests that ask for too much: each is refused, or compiled within the bounds, and harms no other.

How long they take is no test's business: what bounds it are limits that count work, and those are tested.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from resource import getpagesize
from time import process_time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from drafter.confined import BoundError, Bounds
from drafter.drafters.registry import load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import RequestError
from drafter.methods.grammar import compiling, grammars
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.test_validity import base, tokenizer
from tests.methods.grammar.test_validity import grammars as shared
from tests.support.models import finish
from tests.support.properties import examples
from tests.support.waiting import wait_until
from tests.support.walks import walk


def _objects(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}, **more}


def _chain(count: int, link: Any, end: Any) -> dict[str, Any]:
    """Definitions of which each leads to the next; `link` makes one from the reference."""
    links = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": end}}


def _nested(depth: int, wrap: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def _pair(one: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [one, one], "minItems": 2, "maxItems": 2}


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


_HUGE = 10**400
REFUSED: dict[str, Any] = {
    "sixty objects in each other": _nested(60, lambda inner: {"type": "object", "properties": {"a": inner}}),
    "anyOf in anyOf": _nested(60, lambda inner: {"anyOf": [inner]}),
    "anyOf that doubles": _nested(12, lambda inner: {"anyOf": [inner, inner]}),
    "an enum of 20,000": {"enum": [f"v{index}" for index in range(20_000)]},
    "an enum of long texts": {"enum": [f"{index:0100}" for index in range(1000)]},
    "a product of anyOfs": {
        "allOf": [
            {"anyOf": [{"required": [f"{name}{index}"], "type": "object"} for name in "ab"]} for index in range(20)
        ]
    },
    "5,000 optional properties": _objects(5000),
    "one of 1,000 properties": _objects(1000, additionalProperties=False, minProperties=1),
    "many multiples": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]},
    "a large multiple": {"type": "integer", "multipleOf": 999_983},
    "a length of 20 digits": _text(maxLength=10**19),
    "a description of a megabyte": {"description": "x" * 10**6},
    "a name of 50,000 characters": {"type": "object", "properties": {"n" * 50_000: {}}, "required": ["n" * 50_000]},
    "constants that double": _chain(16, _pair, {"const": "x" * 100}),
    "a pattern of a million": _text(pattern="^a{1000000}$"),
    "itself": {"$ref": "#"},
    "two that are each other": _chain(1, lambda next_one: next_one, {"$ref": "#/$defs/d0"}),
    "all of itself": {"allOf": [{"$ref": "#"}]},
    "all of itself and more": _chain(
        1, lambda next_one: {"allOf": [next_one, _objects(1)]}, {"allOf": [{"$ref": "#/$defs/d0"}]}
    ),
    "a conjunction of counters": {
        "allOf": [_text(pattern=f"^.{{0,{index}}}x.{{0,{index * 3}}}y") for index in range(1, 14)]
    },
    "a default that no float holds": {"default": _HUGE},
    "a bound that no float holds, of a text": _text(maximum=_HUGE),
    "a number above all floats": {"type": "number", "minimum": _HUGE},
    "a whole number below all floats": {"type": "integer", "exclusiveMaximum": -_HUGE},
    "127 lists in each other": {"enum": json.loads("[" * 128 + "]" * 128)},
    "patterns that overlap": {"type": "object", "patternProperties": {f"^k{index}.*z$": {} for index in range(100)}},
}
FOLLOWED: dict[str, Any] = {
    "bounds of 300 digits": {"type": "number", "minimum": -1.7e308, "maximum": 1.7e308},
    "bounds beyond all floats": {"type": "number", "minimum": -_HUGE, "exclusiveMaximum": _HUGE},
    "whole numbers within bounds beyond all floats": {"type": "integer", "exclusiveMinimum": -_HUGE, "maximum": _HUGE},
    "a chain of 3,000 references": _chain(3000, lambda next_one: next_one, {"type": "integer"}),
    "a chain of 2,500 arrays": _chain(2500, lambda next_one: {"items": next_one}, True),
    "references that double": _chain(60, lambda next_one: {"anyOf": [next_one, next_one]}, {"type": "integer"}),
    "references that multiply": _chain(40, lambda next_one: {"type": "array", "prefixItems": [next_one] * 4}, True),
    "an enum of objects": {"enum": [{"a": index, "b": [index]} for index in range(1000)]},
    "1,000 optional properties": _objects(1000),
    "1,000 alternatives": {"anyOf": [_objects(1, required=[f"k{index}"]) for index in range(1000)]},
    "a long repetition": _text(pattern="^a{1,100000}$"),
    "a repetition of a repetition": _text(pattern="^(a{1,1000}){1,1000}$"),
    "nested quantifiers": _text(pattern="^((a+)+)+b$"),
    "2,000 alternations": _text(pattern=f"^({'|'.join(f'a{index}b*c{index % 7}' for index in range(2000))})*$"),
    "a counter behind anything": _text(pattern="a.{300}b.{30}$"),
    "classes of Unicode": _text(pattern=r"(\p{L}.*\p{N}.*\p{Greek}.*\p{Cyrillic}){5}"),
    "at least a million characters": _text(minLength=10**6),
    "a billion items": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    "300 addresses": {"type": "object", "properties": {f"p{index}": _text(format="uri") for index in range(300)}},
    "a name of 15,000 characters": {"type": "object", "properties": {"n" * 15_000: {}}, "required": ["n" * 15_000]},
    "a grammar that is many": {
        "$ref": "#/$defs/a",
        "$defs": {
            name: {
                "anyOf": [
                    {"type": "array", "items": {"$ref": "#/$defs/a"}},
                    {"type": "array", "items": {"$ref": "#/$defs/b"}},
                ]
            }
            for name in "ab"
        },
    },
}


_KEYWORDS = """type properties required items prefixItems anyOf oneOf allOf $ref $defs enum const pattern format minimum
exclusiveMaximum multipleOf maxLength minProperties patternProperties additionalProperties uniqueItems x"""
keywords = st.sampled_from(_KEYWORDS.split())
values: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, -1, 3, 2.5, "", "a", "string", "object", "date", "#", "#/$defs/x", "(", [], ["x"], {}]
)
schemas = st.recursive(
    values, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keywords, inner, max_size=4))
)


@examples(200)
@given(st.dictionaries(keywords, schemas, max_size=4))
def test_whatever_is_asked_for_is_compiled_or_refused(schema: dict[str, Any]) -> None:
    with suppress(RequestError):
        assert shared().guide(StructuredOutputs(json=schema), []).problem is None


@pytest.mark.parametrize("name", REFUSED)
def test_too_much_is_refused_on_one_line(name: str) -> None:
    with pytest.raises(RequestError) as found:
        shared().guide(StructuredOutputs(json=REFUSED[name]), [])
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_only_looks_like_much_can_be_written(name: str) -> None:
    guide = shared().guide(StructuredOutputs(json=FOLLOWED[name]), [])
    walk(guide, tokenizer(), Random(0), length=40)


def test_work_that_becomes_too_much_ends_that_output_alone() -> None:
    tight = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    large, small = StructuredOutputs(regex=r"(.*[ab].{40}[cd].{40}.*){3}"), StructuredOutputs(choice=("yes", "no"))
    with patch.object(compiling, "LIMITS", tight):
        made = grammars.Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
        other = made.guide(small, [])
        guide = made.guide(large, [])
        with pytest.raises(AssertionError, match="too many states"):
            walk(guide, tokenizer(), Random(0))
        assert "too many states" in str(guide.problem)
        assert walk(other, tokenizer(), Random(0)) in ("yes", "no")
        walk(made.guide(large, []), tokenizer(), Random(0), length=3)  # by a new automaton: the old one is full


def test_an_ambiguous_grammar_ends_its_output_before_its_steps_take_long() -> None:
    """Each new token may be put together with all before it in ever more ways."""
    guide = shared().guide(StructuredOutputs(grammar='start: x\nx: x x | "a"'), [])
    mask = torch.zeros((len(tokenizer()) + 31) // 32, dtype=torch.int32)
    (token,) = tokenizer()("a", add_special_tokens=False)["input_ids"]
    for _ in range(500):
        guide.fill(mask)
        if not guide.consume(token):
            break
    assert "Too many items (limit 1000" in str(guide.problem)


def test_a_row_whose_grammar_becomes_too_much_fails_alone() -> None:
    asked: list[Any] = [{"regex": "([a-d]*[ab][a-d]{40}[cd][a-d]{40}){3}"}, {"choice": ["yes", "no"]}, None]
    with patch.object(compiling, "LIMITS", LLParserLimits(max_lexer_states=150, verbose_errors=False)):
        engine = Engine(base(), load_drafter("forced", base(), 4), tokenizer(), EngineConfig(max_num_seqs=4))
        handles = []
        for one in asked:
            params = SamplingParams(
                max_new_tokens=150, temperature=1.0, seed=1, ignore_eos=one is None, structured_outputs=one
            )
            handles.append(engine.submit(Request([5, 6], params)))
        finish(engine)
    with pytest.raises(RequestError, match="too many states"):
        handles[0].result(0)
    assert handles[1].result(0).text in ("yes", "no")
    assert len(handles[2].result(0).token_ids) == 150


def test_a_grammar_that_many_threads_ask_for_is_compiled_once_and_holds_up_no_other() -> None:
    made = grammars.Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
    slow, other = StructuredOutputs(choice=("yes",)), StructuredOutputs(choice=("no",))
    compiled_ones, go_on = [], threading.Event()

    def compile_slowly(asked: StructuredOutputs, *others: Any) -> Any:
        compiled_ones.append(asked)
        if asked == slow:
            assert go_on.wait(60)
        return compiling.compiled(asked, *others)

    with patch.object(grammars, "compiled", compile_slowly), ThreadPoolExecutor(16) as threads:
        waiting = [threads.submit(made.guide, slow, []) for _ in range(15)]
        assert walk(made.guide(other, []), tokenizer(), Random(0)) == "no"
        go_on.set()
        assert {walk(one.result(), tokenizer(), Random(0)) for one in waiting} == {"yes"}
    assert sorted(compiled_ones, key=str) == sorted([slow, other], key=str)


DOUBLED = "\n".join(["start: a0", *(f"a{one}: a{one + 1} a{one + 1}" for one in range(20)), f'a20: "{"x" * 8000}"'])
"""A grammar of a few thousand characters, which forces a text of gigabytes."""
HIDDEN = {"grammar": DOUBLED.replace("start: a0", 'start: /[0-9]+/ "," ("x" | "y" a0)')}
TOO_LONG: list[dict[str, Any]] = [
    HIDDEN,
    {"choice": ["a" + "x" * 20_000, "b"]},
    {"regex": "(yes|no)" + "x" * 20_000},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": ["x" * 100] * 200}}}},
]
_EITHER = [{"anyOf": [{"type": "object", "required": [f"{name}{one}"]} for name in "ab"]} for one in range(12)]
SLOW = {"type": "object", "properties": {f"q{place}": {"allOf": _EITHER} for place in range(60)}}
"""A schema that is refused after many seconds, as its places are tried."""


def test_what_takes_too_much_memory_or_time_ends_in_another_process() -> None:
    """And what is small is compiled after it as ever."""
    made = grammars.Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
    before, begun = _resident(), process_time()
    with patch.object(compiling, "_BOUNDS", Bounds(compiling._BOUNDS.memory, 0.0)):
        with pytest.raises(RequestError, match="ends the process that does it when it is compiled"):
            made.guide(StructuredOutputs(json=SLOW), [])
        with pytest.raises(RequestError, match="cannot be used"):
            made.guide(StructuredOutputs(grammar=DOUBLED), [])
    assert walk(made.guide(StructuredOutputs(choice=("a", "b")), []), tokenizer(), Random(0)) in ("a", "b")
    assert _resident() - before < 64 << 20
    assert process_time() - begun < 1.0


@pytest.mark.parametrize("asked", TOO_LONG)
def test_a_long_text_is_refused_also_behind_a_choice(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"cannot be used: it (leaves no choice for more than|takes more than 2 s)"):
        shared().guide(StructuredOutputs(**asked), [])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def test_who_gives_up_ends_the_work() -> None:
    made = grammars.Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
    with ThreadPoolExecutor(1) as thread, patch.object(compiling, "_BOUNDS", Bounds(1 << 40, 1000.0)):
        endless = thread.submit(made.guide, StructuredOutputs(json=SLOW), [])
        wait_until(lambda: compiling.trials()._busy or None, "a trial")
        made.stop()
        with pytest.raises(RequestError) as found:
            endless.result()
    assert isinstance(found.value.__cause__, BoundError)


def test_what_is_compiled_for_one_salt_serves_no_other() -> None:
    made = grammars.Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
    asked = StructuredOutputs(choice=("yes", "no"))
    with patch.object(grammars, "compiled", wraps=compiling.compiled) as compile_one:
        for salt, known, compiled_ones in (("a", False, 1), ("a", True, 1), ("b", False, 2), ("", False, 3)):
            assert made.ready(asked, salt) == known
            assert walk(made.guide(asked, [], salt), tokenizer(), Random(1)) == "no"
            assert compile_one.call_count == compiled_ones


def test_threads_that_compile_at_once_leave_the_stacks_of_others_as_they_are() -> None:
    before = threading.stack_size()
    with ThreadPoolExecutor(8) as threads:
        compiling._deep_thread.cache_clear()
        names = set(threads.map(lambda _: compiling.on_deep_stack(threading.current_thread), range(16)))
    assert (len(names), threading.stack_size()) == (1, before)


def test_a_refusal_is_the_same_for_whoever_asks_again() -> None:
    messages = set()
    for _ in range(2):
        with pytest.raises(RequestError) as found:
            shared().guide(StructuredOutputs(json=json.dumps({"not": {}})), [])
        messages.add(str(found.value))
    assert len(messages) == 1
