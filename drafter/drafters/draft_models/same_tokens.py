"""Whether two tokenisers give the same texts the same ids: a draft model's tokens must be the base's."""

from __future__ import annotations

from typing import Any

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ta tab\n\n\nand three lines  ",
    "In 2024 it cost $1,234.56, or 98.7 % of 3×10⁸.",
    "def f(x):\n    return {'a': x ** 2}  # don't\n",
    "Ärger über naïve Größen: ﬁne, Å, e\u0301",
    "東京は日本の首都です。 Москва — столица. 🙂👩‍👩‍👧",
)
"""Texts on which tokenisers of the same vocabulary part: spaces, digits, contractions, normal forms, bytes."""


def difference(theirs: Any, ours: Any) -> str | None:
    """Return what tells a draft model's tokeniser from the base's, in a few words; None if nothing does."""
    found, wanted = theirs.get_vocab(), ours.get_vocab()
    if found != wanted:
        others = sorted(token for token in found.keys() | wanted.keys() if found.get(token) != wanted.get(token))
        example = others[0]
        return (
            f"{len(others):,} of {len(wanted):,} tokens differ, such as {example!r} "
            f"({_id(found, example)} there, {_id(wanted, example)} in the base's)"
        )
    for text in _TEXTS:
        if theirs.encode(text, add_special_tokens=False) != ours.encode(text, add_special_tokens=False):
            return f"it has the same vocabulary, but encodes {text!r} otherwise"
    return None


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"
