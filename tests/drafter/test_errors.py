"""Messages are for a terminal, which acts on some characters."""

from __future__ import annotations

import pytest

from drafter.errors import one_line, printable, without_secrets


def test_what_a_terminal_acts_on_is_escaped() -> None:
    assert printable("\x1b[31m\x9bred\u202e\x7f") == "\\x1b[31m\\x9bred\\u202e\\x7f"
    assert printable("größer, 漢字 и 'quoted' \\ ☃") == "größer, 漢字 и 'quoted' \\ ☃"
    assert one_line("a \x1b]0;title\x07\n  b") == "a \\x1b]0;title\\x07 b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://KEY:SEC/RET+x=@bucket/in?region=eu cannot be opened", "s3://***@bucket/in?region=eu cannot be opened"),
        ("https://user:pw@host/x and https://token@host", "https://***@host/x and https://***@host"),
        ("s3://b/x?access_key=A&secret_key=S&region=eu", "s3://b/x?access_key=***&secret_key=***&region=eu"),
        ("https://b/x?X-Amz-Signature=abc&y=1", "https://b/x?X-Amz-Signature=***&y=1"),
        ("the token hf_abcdefghijklmnopqrstuvwxyz012345", "the token hf_***"),
        ('{"input": "s3://A:B@b", "mail": "q@z"}', '{"input": "s3://***@b", "mail": "q@z"}'),
    ],
)
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert one_line(text) == shown


@pytest.mark.parametrize(
    "uri", ["hf://datasets/owner/name@revision/a:b@c", "http://host:8000/a@b", "s3://bucket/day=3@x", "me@host"]
)
def test_what_is_no_credential_is_shown(uri: str) -> None:
    assert without_secrets(uri) == uri
