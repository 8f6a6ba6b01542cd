"""What a row asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import RowError
from pipeline.generate.row_requests import row_messages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no messages"),
        ([], "no messages"),
        ("hello", "is not JSON"),
        ('{"role": "user"}', "must be a list"),
        (["hello"], "message 1 must be an object with role and content, not 'hello'"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": 5}], "content of message 1 must be text or a list of typed parts"),
        ([{"role": "user", "content": ["x"]}], "content of message 1 must be text or a list of typed parts"),
    ],
)
def test_bad_messages(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        row_messages(value, "messages")


def test_messages_as_lists_and_as_text_are_the_same() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    assert row_messages(messages, "m") == row_messages(json.dumps(messages), "m") == [{"role": "user", "content": "x"}]
