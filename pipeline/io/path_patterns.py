"""Patterns of paths: `*`, `?` and `[…]` within a name, `**` across folders."""

from __future__ import annotations

import re

_WILDCARD = re.compile(r"[*?\[]")
_TOKENS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", flags=re.DOTALL)


def split_query(uri: str) -> tuple[str, str]:
    """Split a URI before its first `?`, which is no wildcard there; a path has no query."""
    if "://" not in uri:
        return uri, ""
    path, mark, query = uri.partition("?")
    return path, mark + query


def is_pattern(uri: str) -> bool:
    """Return whether a path or URI has a wildcard."""
    return _WILDCARD.search(split_query(uri)[0]) is not None


def pattern_base(pattern: str) -> str:
    """Return the folder above the first wildcard of a pattern."""
    path, query = split_query(pattern)
    first = _WILDCARD.search(path)
    assert first is not None
    return (path[: first.start()].rpartition("/")[0] or "/") + query


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Translate a pattern to a regular expression (`glob.translate` does this from Python 3.13 on)."""
    translated = ""
    for token in _TOKENS.findall(pattern):
        if token == "**/":
            translated += "(?:.*/)?"
        elif token == "**":
            translated += ".*"
        elif token == "*":
            translated += "[^/]*"
        elif token == "?":
            translated += "[^/]"
        elif len(token) > 1:
            translated += "[" + token[1:-1].replace("\\", r"\\").replace("!", "^", token[1] == "!") + "]"
        else:
            translated += re.escape(token)
    return re.compile(translated, flags=re.DOTALL)
