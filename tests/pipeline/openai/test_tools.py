"""Tools in bodies, and the forms of calls in chat templates."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from drafter.calls import CallForm, Calls
from drafter.structured_outputs import StructuredOutputs
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import parse_chat
from pipeline.openai.tools import Tools, call_form, chat_tools

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
NAMED = {"type": "function", "function": {"name": "look"}}


class Tokenizer:
    """A tokeniser with a chat template, of whose added tokens some are special."""

    def __init__(self, template: str | None, **added: bool) -> None:
        self._template = template
        tokens = [SimpleNamespace(content=name, special=special) for name, special in added.items()]
        self.added_tokens_decoder = dict(enumerate(tokens))

    def get_chat_template(self, chosen: None, tools: Any) -> str:
        if self._template is None:
            raise ValueError("there is none")
        return self._template


HERMES = Tokenizer("{{ tools }} <tool_call>\\n{{ call }}\\n</tool_call>", **{"<tool_call>": False})


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **more}


def calls_of(**more: Any) -> Calls:
    settings = parse_chat(body(tools=[ADD, LOOK, STOP], **more)).for_model(HERMES).settings
    found = settings["structured_outputs"].calls
    assert isinstance(found, Calls)
    return found


def schemas(calls: Calls) -> dict[str, Any]:
    return {name: json.loads(schema) for name, schema in calls.functions}


ANY = {"type": "object"}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}


def test_arguments_follow_schemas_where_a_call_is_needed_and_those_of_strict_functions_always() -> None:
    assert schemas(calls_of(tool_choice="required")) == {"add": SCHEMA, "look": SCHEMA, "stop": NONE}
    assert schemas(calls_of(tool_choice=NAMED)) == {"look": SCHEMA}
    assert schemas(calls_of()) == schemas(calls_of(tool_choice="auto")) == {"add": SCHEMA, "look": ANY, "stop": ANY}


def test_what_the_output_may_be_beside_calls() -> None:
    assert calls_of().otherwise == ""
    assert calls_of(response_format={"type": "json_object"}).otherwise == '{"type":"object"}'
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert json.loads(calls_of(response_format=format).otherwise or "") == SCHEMA
    for choice in ("required", NAMED):
        assert calls_of(tool_choice=choice, response_format=format).otherwise is None
    assert [calls_of(parallel_tool_calls=several).several for several in (None, True, False)] == [True, True, False]
    assert not calls_of(tool_choice=NAMED).several


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    parsed = parse_chat(body(tools=[ADD], tool_choice="none", response_format={"type": "json_object"}))
    assert parsed.tools is None
    assert vars(parsed.prompts[0])["tools"] is None
    assert parsed.for_model(HERMES).settings["structured_outputs"] == StructuredOutputs(json_object=True)
    assert vars(parse_chat(body(tools=[ADD, LOOK], tool_choice=NAMED)).prompts[0])["tools"] == [ADD, LOOK]


QWEN = CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('within XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', QWEN),
        ("<tool_call>\n{{ tool_call.arguments | tojson }}\n</tool_call>", QWEN),
        ("<tool_call>[\n{...}, (more calls)\n]</tool_call>", CallForm("<tool_call>", "[", ", ", "]</tool_call>")),
        ('{{- "[TOOL_CALLS] [" }}', CallForm("[TOOL_CALLS]", " [", ", ", "]")),
        ('{{- "[TOOL_CALLS][" }}', CallForm("[TOOL_CALLS]", "[", ", ", "]")),
        ("<|tool_call|>", CallForm("<|tool_call|>", "[", ", ", "]")),
        ('"parameters": dictionary ... <|python_tag|>', CallForm("<|python_tag|>", arguments="parameters", bare=True)),
        ('{"name": function name, "parameters": dictionary}', CallForm(arguments="parameters", bare=True)),
        ("{{ tools }}", CallForm(bare=True)),
        (None, CallForm(bare=True)),
    ],
)
def test_the_form_of_calls_is_that_of_the_chat_template(template: str | None, form: CallForm) -> None:
    assert call_form(Tokenizer(template), [ADD]) == form


def test_marks_that_are_tokens_are_not_texts_of_an_output() -> None:
    mistral = Tokenizer("{{ tools }} [TOOL_CALLS] [", **{"[TOOL_CALLS]": True, "<think>": False, "[x]": False})
    parsed = parse_chat(body(tools=[ADD])).for_model(mistral)
    assert parsed.marks is not None
    mark = parsed.marks.tokens[0]
    assert parsed.marks.form == CallForm(mark, " [", ", ", "]")
    assert parsed.settings["structured_outputs"].calls.form.marker == "[TOOL_CALLS]"
    assert [parsed.marks.plain(one) for one in parsed.marks.tokens.values()] == ["", "<think>"]
    assert parsed.marks.plain(f"a{mark}b") == "ab"
    text = parse_chat(body(tools=[ADD])).for_model(Tokenizer("{{ tools }} <tool_call>"))
    assert text.marks is not None
    assert (text.marks.form, text.marks.tokens) == (QWEN, {})


@pytest.mark.parametrize("template", ["<tool_call>\n<function=f>", "<｜tool▁calls▁begin｜>", "[TOOL_CALLS]f[ARGS]{}"])
def test_forms_that_are_no_objects_with_a_name(template: str) -> None:
    tokenizer = Tokenizer("{{ tools }}" + template)
    auto = parse_chat(body(tools=[ADD])).for_model(tokenizer)
    assert (auto.tools, auto.marks, auto.settings) == (None, None, {})
    with pytest.raises(OpenAIError, match="none or auto") as caught:
        parse_chat(body(tools=[ADD], tool_choice="required")).for_model(tokenizer)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_a_call_that_has_no_mark_cannot_be_told_from_another_object() -> None:
    asked = body(tools=[ADD], response_format={"type": "json_object"})
    with pytest.raises(OpenAIError, match="does not mark calls") as caught:
        parse_chat(asked).for_model(Tokenizer("{{ tools }}"))
    assert caught.value.param == "tools"
    assert parse_chat({**asked, "tool_choice": "required"}).for_model(Tokenizer("{{ tools }}")).marks


@pytest.mark.parametrize(
    ("asked", "param", "code", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "invalid_type", 'tools of type "function"'),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter", ""),
        (
            {"tools": [ADD, {"type": "function", "function": {"name": "a b"}}]},
            "tools[1].function.name",
            "invalid_value",
            "64 letters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "invalid_type",
            "an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
            "invalid_value",
            'type "object"',
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "kind": 1}}]},
            "tools[0].function.kind",
            "unknown_parameter",
            "",
        ),
        ({"tools": [ADD, ADD]}, "tools", "invalid_value", "several functions 'add'"),
        ({"tools": [STOP] * 129}, "tools", "array_above_max_length", "up to 128 are allowed, not 129"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_parameter_combination", "needs 'tools'"),
        ({"tools": [ADD], "tool_choice": NAMED}, "tool_choice", "invalid_value", "no function 'look'"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "unsupported_value", "required"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "unsupported_value", "required"),
        ({"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type", "boolean"),
        ({"tools": [ADD], "ignore_eos": True}, "ignore_eos", "invalid_parameter_combination", "does not go with"),
        (
            {"tools": [ADD], "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_parameter_combination",
            "'structured_outputs.regex' does not go with 'tools'",
        ),
    ],
)
def test_what_cannot_be_understood_is_refused_by_its_place(
    asked: dict[str, Any], param: str, code: str, words: str
) -> None:
    with pytest.raises(OpenAIError) as caught:
        parse_chat(body(**asked))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert words in caught.value.message


def test_a_choice_without_effect_is_no_mistake() -> None:
    assert chat_tools(None, "auto", None) is chat_tools([], "none", True) is chat_tools([ADD], "none", False) is None
    assert isinstance(chat_tools([ADD], None, None), Tools)


def test_schemas_that_are_too_long_are_refused() -> None:
    long = {"type": "object", "description": "x" * 120_000}
    tools = [{"type": "function", "function": {"name": "add", "parameters": long}}]
    with pytest.raises(OpenAIError, match="up to 120000 characters") as caught:
        parse_chat(body(tools=tools, tool_choice="required")).for_model(HERMES)
    assert caught.value.param == "tools"
