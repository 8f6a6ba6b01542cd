"""Messages are for a terminal, which acts on some characters."""

from __future__ import annotations

from drafter.errors import one_line, printable


def test_what_a_terminal_acts_on_is_escaped() -> None:
    assert printable("\x1b[31m\x9bred\u202e\x7f") == "\\x1b[31m\\x9bred\\u202e\\x7f"
    assert printable("größer, 漢字 и 'quoted' \\ ☃") == "größer, 漢字 и 'quoted' \\ ☃"
    assert one_line("a \x1b]0;title\x07\n  b") == "a \\x1b]0;title\\x07 b"
