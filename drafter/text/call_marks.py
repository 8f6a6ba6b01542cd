"""Tokens that mark calls of functions, in the text of an output.

A text may say anything, also what calls look like. Where a form's marks are tokens, they are therefore kept as
characters that no tokeniser's text has: halves of surrogate pairs. Such a text is a *marked* one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from drafter.calls import CallForm
from drafter.text.tokenizers import mark_texts, special_texts

_OTHER = "\udbff"
"""Stands before what is shown of a token that no call has: what is before it and behind it is not one text."""
_FIRST = 0xD800


@dataclass(frozen=True)
class CallMarks:
    """The marks of calls.

    Args:
        form: The form of calls, as it is in marked texts.
        tokens: What stands in marked texts for tokens.
        shown: What people see of the marks: nothing of special tokens.
    """

    form: CallForm
    tokens: Mapping[int, str]
    shown: Mapping[int, str]

    @classmethod
    def of(cls, tokenizer: Any, form: CallForm) -> CallMarks:
        return _marks_of(tokenizer, form)

    def plain(self, marked: str) -> str:
        """Return a marked text as people see it."""
        return marked.translate(self.shown)

    def beginning(self, marked: str, length: int, *, whole: bool = True) -> str:
        """Return the beginning of a marked text of which people see so many characters.

        Args:
            whole: Leave out a mark of which they see more; otherwise the part of it is text.
        """
        for place, character in enumerate(marked):
            seen = len(self.shown.get(ord(character), character))
            if seen > length:
                return marked[:place] + ("" if whole else self.plain(character)[:length])
            length -= seen
        return marked


@lru_cache(maxsize=16)
def _marks_of(tokenizer: Any, form: CallForm) -> CallMarks:
    special, added = special_texts(tokenizer), mark_texts(tokenizer)
    written = form.marker + form.first + (form.between or "") + form.last
    tokens, shown, marks = dict[int, str](), {ord(_OTHER): ""}, dict[str, str]()
    for token, text in added.items():
        seen = "" if token in special else text
        if text and text in written:
            marks[text] = tokens[token] = chr(_FIRST + len(marks))
            shown[ord(tokens[token])] = seen
        else:
            tokens[token] = _OTHER + seen
    return CallMarks(form.with_marks(marks), tokens, shown)
