"""Regular expressions: what those of a schema may not have."""

from __future__ import annotations

import re
from typing import Any

_QUANTIFIER = r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}"
_UNSUPPORTED = (
    (r"\(\?<?[=!]", "look-around"),
    (r"\\(?:[1-9]|k<)", "a back-reference"),
    (r"\\[bB]", "a word boundary"),
    (r"\(\?(?![:iP<])", "an inline flag other than (?i)"),
    (r"\\x\{", r"\x{…}, for which \u{…} is standard,"),
    (rf"(?:{_QUANTIFIER})(?:[*+]|\{{[0-9])", "a repetition of a repetition"),
)
_TOKEN = re.compile(
    "|".join(f"(?P<u{index}>{one})" for index, (one, _) in enumerate(_UNSUPPORTED)) + r"|\\.|(?P<open>\[\^?\]?)|.",
    re.DOTALL,
)
_IN_CLASS = re.compile(r"(?P<set>\[|&&|--|~~)|\\.|(?P<close>\])|.", re.DOTALL)


def pattern_problem(pattern: Any) -> str | None:
    """Return what a regular expression has that llguidance cannot follow or reads unlike ECMA-262; None if nothing."""
    if not isinstance(pattern, str):
        return "a pattern must be a text"
    place, inside = 0, False
    while place < len(pattern):
        found = (_IN_CLASS if inside else _TOKEN).match(pattern, place)
        assert found is not None  # each ends in a dot
        kind, place = found.lastgroup, found.end()
        if kind == "set":
            return f"a pattern with {found.group()} inside of brackets is not supported: put \\ before each of it"
        if kind in ("open", "close"):
            inside = kind == "open"
        elif kind is not None:
            return f"a pattern with {_UNSUPPORTED[int(kind[1:])][1]} is not supported: write it without"
    return None
