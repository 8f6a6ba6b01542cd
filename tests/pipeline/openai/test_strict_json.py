from __future__ import annotations

import pytest

from pipeline.openai.errors import OpenAIError, parse_json, to_json


def test_json_is_read() -> None:
    assert parse_json('{"a": ["é", "\\ud83d\\ude00", 1.5, 2.0, null]}'.encode()) == {"a": ["é", "😀", 1.5, 2, None]}


def test_json_is_written_on_one_line() -> None:
    value = {"text": "".join(map(chr, range(0x3000)))}
    assert len(to_json(value).splitlines()) == 1
    assert parse_json(to_json(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value at line 1, column 1"),
        (b'{"a": 1,}', "double quotes at line 1, column 9"),
        (b'{"a": "\xff"}', "it is not valid UTF-8"),
        (b'{"a": "\\ud800"}', "it is not valid UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a": NaN}', "a number that cannot be read"),
        (b'{"a": -Infinity}', "a number that cannot be read"),
        (b"9" * 5000, "a number that cannot be read"),
        (b'{"a": 1e999}', "a number that cannot be read"),
        (b"[-1.5E+400]", "a number that cannot be read"),
    ],
)
def test_what_is_not_json_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(OpenAIError, match=reason) as refusal:
        parse_json(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")
