"""What a row asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter.text.conversation import Conversation
from pipeline.errors import RowError
from pipeline.generate.prompts import row_conversation


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no messages"),
        ([], "no messages"),
        ("hello", "is not JSON"),
        ('{"role": "user"}', "must be a list"),
        (["hello"], "message 1 must be an object with role and content, not 'hello'"),
        ([{"content": "x"}], r"message 1 has no role, but \['content'\]: a message is {role, content}"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": 5}], "content of message 1 must be text or a list of typed parts"),
        ('[{"role": "user", "content": "\\uD83D"}]', "column 'messages': it has half a character"),
        ([{"role": "user", "content": ["x"]}], "content of message 1 must be text or a list of typed parts"),
    ],
)
def test_bad_messages(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        row_conversation({"messages": value}, "messages")


def test_messages_as_lists_and_as_text_are_the_same() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    beside: dict[str, Any] = {
        "tools": [{"name": "add"}],
        "documents": [{"text": "a"}],
        "chat_template_kwargs": {"thinking": False},
    }
    wanted = Conversation(messages, **beside)
    texts = {name: json.dumps(value) for name, value in {"m": messages, **beside}.items()}
    assert row_conversation({"m": messages, **beside}, "m") == row_conversation(texts, "m") == wanted
    assert row_conversation({"m": messages, "tools": None, "documents": " "}, "m") == Conversation(messages)


def test_columns_of_the_template_are_objects() -> None:
    half = '[{"text": "\\udc00"}]'
    wrong = (("tools", "add"), ("tools", 5), ("documents", ["a"]), ("documents", half), ("chat_template_kwargs", [1]))
    for name, value in wrong:
        with pytest.raises(RowError, match=name):
            row_conversation({"m": [{"role": "user", "content": "x"}], name: value}, "m")
