"""Tools for chat templates that read none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from drafter.embedded import EMBEDDED_BASE
from drafter.requests import Generation, SamplingParams
from drafter.statistics import DecodeCounts
from drafter.text.chat import render_chat
from drafter.text.conversation import Conversation
from drafter.text.text_stream import read_output
from pipeline.openai.answers import response
from pipeline.openai.requests import ParsedRequest, parse_chat
from pipeline.openai.told_tools import FORM, is_told, told

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {"at": {}}}},
}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TURNS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate, and there is no system') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "4"}]},
    {"role": "user", "content": "And?"},
]


TAKEN = ["user", "assistant", "user"]


def tokenizer_of(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    tokenizer.chat_template = template
    return tokenizer


def asked(tokenizer: Any, **more: Any) -> ParsedRequest:
    return parse_chat({"model": "m", "messages": MESSAGES, "tools": [TOOL], **more}).for_model(tokenizer)


@pytest.mark.parametrize(("template", "roles"), [(TURNS, ["system", *TAKEN]), (STRICT, TAKEN)])
def test_all_is_in_messages_that_the_template_takes(template: str, roles: list[str]) -> None:
    tokenizer = tokenizer_of(template)
    chat = asked(tokenizer).prompts[0]
    assert isinstance(chat, Conversation)
    assert chat.tools is None
    assert [message["role"] for message in chat.messages] == roles
    text = render_chat(tokenizer, chat).text
    assert '{"name":"look","description":"Look."' in text
    assert f"{WRITTEN}\n{WRITTEN}<|end|>" in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert text.index("How many?") < text.index(WRITTEN) < text.index("3") < text.index("And?")


def test_an_output_is_held_to_the_form_and_read_in_it() -> None:
    tokenizer = tokenizer_of(TURNS)
    for more in ({}, {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}):
        request = asked(tokenizer, **more)
        assert request.settings["structured_outputs"].calls.form == FORM
        ids = tokenizer.encode(WRITTEN, add_special_tokens=False)
        said = read_output(tokenizer, [5], ids, request.sampling(SamplingParams()))
        made = Generation("", ids, said.text, "stop", 1, DecodeCounts(), marked=said.marked)
        [choice] = response(request, [made], "c", 1, str)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"at": "é"}


def test_calls_and_results_are_texts_also_without_tools() -> None:
    for more in ({"tools": None}, {"tool_choice": "none"}):
        chat = asked(tokenizer_of(TURNS), **more).prompts[0]
        assert isinstance(chat, Conversation)
        assert [message["role"] for message in chat.messages] == ["user", "assistant", "user"]
        assert chat.messages[1]["content"] == f"{WRITTEN}\n{WRITTEN}"


def test_what_has_no_tools_or_a_template_for_them_stays() -> None:
    plain = parse_chat({"model": "m", "messages": MESSAGES[:1]})
    assert plain.for_model(tokenizer_of(TURNS)) is plain
    assert not is_told(Conversation(MESSAGES[:1]))
    chat = asked(tokenizer_of("{{ tools }}" + TURNS)).prompts[0]
    assert isinstance(chat, Conversation)
    assert (chat.tools, len(chat.messages)) == ([TOOL], len(MESSAGES))


def test_a_message_of_the_system_is_added_to() -> None:
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    for system, place in ((True, 0), (False, 0)):
        chat = told(Conversation(said[not system :], [TOOL]), needed=True, system=system)
        assert len(chat.messages) == 2 - (not system)
        content = chat.messages[place]["content"]
        assert content.startswith("Be short.\n\n") if system else content[1] == {"type": "image"}
        assert "Answer with a call." in str(content)
