"""Outputs with calls of functions, in forms whose marks are text or tokens."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from drafter.acceptance.guide import Guide
from drafter.calls import CallForm, Calls
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import RequestError
from drafter.methods.grammar.grammars import Grammars
from drafter.structured_outputs import CallOutputs, StructuredOutputs
from drafter.text.tokenizers import load_tokenizer

TAGGED = CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LISTED = CallForm("[TOOL_CALLS]", " [", ", ", "]")
BARE = CallForm("<|python_tag|>", arguments="parameters", bare=True)
FORMS = {"tagged": TAGGED, "listed": LISTED, "bare": BARE}
MARKED = [TAGGED, LISTED]
SCHEMA = '{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"],"additionalProperties":false}'
FUNCTIONS = (("add", SCHEMA), ("take", '{"type":"object"}'))
ADD = ("add", '{"x": 1}')
TAKE = ("take", '{"y": "}"}')


@cache
def grammars(tokens: bool) -> tuple[Any, Grammars]:
    tokenizer = load_tokenizer(str(EMBEDDED_BASE))
    if tokens:
        tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<tool_call>", "</tool_call>", "<think>")])
        tokenizer.add_tokens([AddedToken(one, special=True) for one in ("[TOOL_CALLS]", "<|python_tag|>")])
    return tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.fixture(params=[False, True], ids=["text", "tokens"])
def tokens(request: pytest.FixtureRequest) -> bool:
    """Whether marks are tokens."""
    return bool(request.param)


def guide_of(tokens: bool, form: CallForm, **more: Any) -> Guide:
    return grammars(tokens)[1].guide(CallOutputs(calls=Calls(form, FUNCTIONS, **more)), [5])


def follows(guide: Guide, text: str, tokens: bool) -> str:
    """How far an output goes: `no`, `begun`, or `whole`, where it may end."""
    tokenizer = grammars(tokens)[0]
    if not all(guide.consume(token) for token in tokenizer.encode(text, add_special_tokens=False)):
        return "no"
    return "whole" if guide.consume(tokenizer.eos_token_id) else "begun"


def written(form: CallForm, *calls: tuple[str, str], marked: bool = True) -> str:
    texts = [form.head(name) + arguments + "}" for name, arguments in calls]
    return (form.marker if marked else "") + form.first + (form.between or "").join(texts) + form.last


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_calls_and_nothing_else(form: CallForm, tokens: bool) -> None:
    cases = {
        written(form, ADD, marked=not form.bare): "whole",
        written(form, TAKE, marked=not form.bare): "whole",
        written(form, ADD, marked=not form.bare) + " ": "no",
        written(form, ("add", '{"x": 3}'), marked=not form.bare): "no",
        written(form, ("drop", "{}"), marked=not form.bare): "no",
        written(form, ("add", '{"x":1}'), marked=not form.bare): "no",
        "": "begun",
        "Hello": "no",
    }
    assert {text: follows(guide_of(tokens, form), text, tokens) for text in cases} == cases


@pytest.mark.parametrize("form", MARKED, ids=["tagged", "listed"])
def test_several_calls_where_they_are_allowed(form: CallForm, tokens: bool) -> None:
    text = written(form, ADD, TAKE, ADD)
    assert follows(guide_of(tokens, form), text, tokens) == "whole"
    assert follows(guide_of(tokens, form, several=False), text, tokens) == "no"


@pytest.mark.parametrize("form", MARKED, ids=["tagged", "listed"])
def test_any_text_until_a_call_begins(form: CallForm, tokens: bool) -> None:
    cases = {
        "": "whole",
        "Hello\n\n": "whole",
        'Write {"name": "add"': "whole",
        form.marker[:-1]: "whole",
        written(form, ADD): "whole",
        "Well." + written(form, ADD, TAKE): "whole",
        "Well." + written(form, ADD) + " Done.": "no",
        "Well." + form.marker: "begun",
        "Well." + form.marker + "x": "no",
        "Well." + written(form, ("add", "{}")): "no",
    }
    cases |= {"<think>Well.<think>" + written(form, ADD): "whole"}
    assert {text: follows(guide_of(tokens, form, otherwise=""), text, tokens) for text in cases} == cases


def test_a_text_or_a_call_in_its_place(tokens: bool) -> None:
    cases = {
        "": "whole",
        "{": "whole",
        '{"a": 1}': "whole",
        '{"name":"add"}': "whole",
        'Write {"name": "other"': "whole",
        written(BARE, ADD, marked=False): "whole",
        '{"name": "ad': "begun",
        '{"name": "other"': "no",
        '{"type": "function", "name"': "no",
        written(BARE, ADD, marked=False) + " Done.": "no",
    }
    if tokens:  # as text, the mark is some text
        cases |= {written(BARE, ADD): "whole", BARE.marker + "x": "no"}
    assert {text: follows(guide_of(tokens, BARE, otherwise=""), text, tokens) for text in cases} == cases


@pytest.mark.parametrize("form", MARKED, ids=["tagged", "listed"])
def test_a_record_or_calls(form: CallForm, tokens: bool) -> None:
    cases = {
        '{"x": 2}': "whole",
        written(form, ADD): "whole",
        "": "begun",
        '{"x": 3}': "no",
        "Hello": "no",
        '{"x": 2}' + written(form, ADD): "no",
    }
    assert {text: follows(guide_of(tokens, form, otherwise=SCHEMA), text, tokens) for text in cases} == cases


def test_a_schema_may_allow_anything() -> None:
    assert follows(guide_of(False, TAGGED, otherwise="true"), '[1, {"a": null}]', False) == "whole"


def test_a_record_and_a_call_without_a_mark_cannot_be_told_apart() -> None:
    with pytest.raises(RequestError, match="does not mark calls"):
        Calls(BARE, FUNCTIONS, otherwise=SCHEMA)


@pytest.mark.parametrize("schema", ['{"unevaluatedProperties":false}', '{"properties":{"x":{"pattern":"("}}}'])
def test_the_function_whose_schema_cannot_be_followed_is_named(schema: str) -> None:
    asked = CallOutputs(calls=Calls(TAGGED, (*FUNCTIONS, ("odd", schema)), otherwise=""))
    with pytest.raises(RequestError, match=r"^structured_outputs\.calls: arguments of the function 'odd': "):
        grammars(False)[1].guide(asked, [5])


def test_calls_go_through_json() -> None:
    """As rows' settings do, on their way to an engine."""
    for form in FORMS.values():
        asked = CallOutputs(calls=Calls(form, FUNCTIONS, several=False, otherwise=""))
        assert StructuredOutputs.of(json.loads(json.dumps(asdict(asked)))) == asked
    wrong: Any
    for wrong in ({}, {"form": {}, "functions": []}, {"form": {}, "functions": [["a", 1]]}, 3):
        with pytest.raises(RequestError, match=r"^structured_outputs\.calls"):
            StructuredOutputs.of({"calls": wrong})
