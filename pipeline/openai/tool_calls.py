"""Finds calls of functions in the text of an output, as it comes or as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafter.text.call_marks import CallMarks

_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  # characters of a call's id: Mistral's templates take no other number


@dataclass(frozen=True)
class CallDelta:
    """More of the `arguments` of a call, which is the one of that `index`, or, with its `name`, the begin of it."""

    index: int
    name: str | None = None
    arguments: str = ""


Delta = str | CallDelta
"""More of the text beside the calls, or of a call."""


class CallReader:
    """Reads the marked text of an output that may call the functions of these names.

    A call is one from where its arguments begin; what never becomes one is text. So nothing that was handed out has to
    be taken back, and a text in pieces gives the same as in one. White space before a call is left out.
    """

    def __init__(self, marks: CallMarks, names: Iterable[str]) -> None:
        form, self._marks = marks.form, marks
        opening = (("" if form.bare else form.marker) + form.first).lstrip()
        # Each ends with the first character of the arguments.
        self._first = {opening + form.head(name) + "{": name for name in names}
        self._more = {f"}}{form.between}{form.head(name)}{{": name for name in self._first.values()}
        if form.between is None:
            self._more = {}
        self._last, self._bare = "}" + form.last, form.bare
        self._begin = opening + '{"name": "'
        self._optional = form.marker if form.bare and form.marker in marks.tokens.values() else ""  # may come first
        self._held = ""  # what may become part of a call, or is white space that may stand before one
        self._said = False  # there is text beside calls
        self._calls = 0
        self._arguments: _Nesting | None = None  # of the call that is being read

    @property
    def whole(self) -> bool:
        """True if there is a call, and the last one has all of its arguments."""
        return self._calls > 0 and (self._arguments is None or self._arguments.closed)

    def push(self, text: str) -> list[Delta]:
        """Take more text; return what is sure by now."""
        self._held += text
        if self._optional and not (self._said or self._calls) and self._held.lstrip().startswith(self._optional):
            self._held, self._optional = self._held.lstrip().removeprefix(self._optional), ""
        found: list[Delta] = []
        while self._advance(found):
            pass
        return found

    def close(self) -> list[Delta]:
        """Return what is left at the end of the text."""
        rest, self._held = self._marks.plain(self._held), ""
        return [rest] if rest and self._arguments is None else []

    def _advance(self, found: list[Delta]) -> bool:
        """Use some of the held text; return whether more of it may be used."""
        if self._arguments is None:
            return self._read_text(found)
        if self._arguments.closed:
            return self._read_between(found)
        taken = self._arguments.read(self._held)
        if taken:
            found.append(CallDelta(self._calls - 1, None, self._marks.plain(self._held[:taken])))
        self._held = self._held[taken:]
        return self._arguments.closed

    def _read_text(self, found: list[Delta]) -> bool:
        start = len(self._held) - len(self._held.lstrip()) if self._bare else 0
        while not self._calls and not (self._bare and self._said):
            place = self._held.find(self._begin, start)
            if place < 0 or (self._bare and place > start):
                break
            rest = self._held[place:]
            if (head := next((head for head in self._first if rest.startswith(head)), None)) is not None:
                self._say(place, found)
                self._begin_call(self._first[head], found)
                self._held = rest[len(head) - 1 :]
                return True
            if any(head.startswith(rest) for head in self._first):
                self._say(place, found)
                return False
            start = place + 1
        self._say(self._text_end(), found)
        return False

    def _text_end(self) -> int:
        """Return where in the held text a call may begin."""
        length = len(self._held)
        if self._calls or (self._bare and (self._said or not self._begin.startswith(self._held.strip()))):
            return length
        longest = range(min(length, len(self._begin)), 0, -1)
        return length - next((size for size in longest if self._held.endswith(self._begin[:size])), 0)

    def _say(self, end: int, found: list[Delta]) -> None:
        """Hand out the held text up to `end`, without white space there."""
        said = self._held[:end].rstrip()
        if said:
            self._said = True
        if seen := self._marks.plain(said):
            found.append(seen)
        self._held = self._held[len(said) :]

    def _begin_call(self, name: str, found: list[Delta]) -> None:
        found.append(CallDelta(self._calls, name))
        self._calls, self._arguments = self._calls + 1, _Nesting()

    def _read_between(self, found: list[Delta]) -> bool:
        """Go on to the next call, if it is sure that there is one, or that there is none."""
        for head, name in self._more.items():
            if self._held.startswith(head):
                self._begin_call(name, found)
                self._held = self._held[len(head) - 1 :]
                return True
        if any(one.startswith(self._held) for one in (*self._more, self._last)):
            return False
        self._held, self._arguments = self._held.removeprefix(self._last), None
        return True


class _Nesting:
    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.closed = False

    def read(self, text: str) -> int:
        """Return the number of characters that belong to the object, which begins with the first text."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self.closed = True
                    return place + 1
        return len(text)


def read_message(marks: CallMarks, names: Iterable[str], text: str, answer: str) -> tuple[dict[str, Any], bool]:
    """Return the message that an output is, and whether it calls functions, each with all of its arguments.

    Args:
        text: The output's, marked.
        answer: What ids of calls follow from.
    """
    reader = CallReader(marks, names)
    content, calls = "", list[dict[str, Any]]()
    for delta in reader.push(text) + reader.close():
        if isinstance(delta, str):
            content += delta
        elif delta.name is not None:
            called = {"name": delta.name, "arguments": ""}
            calls.append({"id": call_id(answer, delta.index), "type": "function", "function": called})
        else:
            calls[-1]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message, reader.whole


def call_chunk(delta: Delta, answer: str) -> dict[str, Any]:
    if isinstance(delta, str):
        return {"content": delta}
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": function}]}
    begun = {"index": delta.index, "id": call_id(answer, delta.index), "type": "function"}
    return {"tool_calls": [begun | {"function": {"name": delta.name} | function}]}


def call_id(answer: str, index: int) -> str:
    """Return the id of a call, which is always the same for the same answer."""
    number = int.from_bytes(hashlib.blake2b(f"{answer}:{index}".encode(), digest_size=8).digest(), "big")
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_DIGITS))
        digits.append(_ID_DIGITS[digit])
    return "".join(digits)
