"""No number of a JSON text goes on without end: it has as many digits as a float holds, or a whole one of 64 bits.

A grammar lets numbers have any number of digits, and a model that has begun to repeat one goes on to its limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafter.methods.grammar.bits import allow_all_but

_MOST = {"whole": 19, "zeros": 20, "fraction": 17, "exponent": 2}
"""Digits of a whole number; zeros between the point and another digit; all digits of a number with a point, without
such zeros; and those of an exponent."""
OUTSIDE = 0
"""The state at the beginning of a JSON text."""
REFUSED = -1
"""The state after a digit too many."""
FREE = -2
"""The state in a text that no JSON has begun in yet."""

_CLASSES = (b"0", b"123456789", b".", b"eE", b"+-", b'"', b"\\")
_ZERO, _DIGIT, _POINT, _E, _SIGN, _QUOTE, _BACKSLASH, _OTHER = range(8)
_CLASS = bytes(next((i for i, ones in enumerate(_CLASSES) if byte in ones), _OTHER) for byte in range(256))
_OF_A_NUMBER = re.compile(rb"[eE+-]*[0-9.]|.*(?:[0-9].*){%d}" % min(_MOST["fraction"], _MOST["whole"]), re.DOTALL)

_State = tuple[str, int]


def _next(state: _State, byte: int) -> _State | None:
    """Return the state after a byte of a class; None if it is a digit too many."""
    kind, count = state
    if kind == "escape":
        return "string", 0
    if kind == "string":
        return {_QUOTE: ("outside", 0), _BACKSLASH: ("escape", 0)}.get(byte, state)
    if byte in (_ZERO, _DIGIT) and kind in _MOST:
        more = ("fraction", 1) if kind == "zeros" and byte == _DIGIT else (kind, count + 1)
        return more if more[1] <= _MOST[more[0]] else None
    if byte in (_ZERO, _DIGIT):
        return ("zero", 0) if byte == _ZERO else ("whole", 1)
    if byte == _POINT and kind in ("zero", "whole"):
        return ("zeros", 0) if kind == "zero" else ("fraction", count) if count < _MOST["fraction"] else None
    if byte == _E and kind != "outside":
        return "exponent", 0
    if byte == _SIGN and kind == "exponent":
        return state
    return ("string" if byte == _QUOTE else "outside"), 0


def _automaton() -> list[list[int]]:
    """Return the state after each state and class of bytes."""
    states: dict[_State | None, int] = {None: REFUSED, ("outside", 0): OUTSIDE}
    found: list[list[int]] = []
    while len(found) < len(states) - 1:
        state = list(states)[len(found) + 1]
        assert state is not None
        after = [_next(state, byte) for byte in range(8)]
        found.append([states.setdefault(one, len(states) - 1) for one in after])
    return found


class Digits:
    """Follows the numbers of JSON texts, token by token.

    Args:
        text: The bytes of a token.
        vocabulary: The number of tokens.
    """

    _TABLE = _automaton()

    def __init__(self, text: Callable[[int], bytes], vocabulary: int) -> None:
        self._text = text
        texts = [text(token) for token in range(vocabulary)]
        self._classes = [one.translate(_CLASS) for one in texts]
        self._of_numbers = [token for token, one in enumerate(texts) if _OF_A_NUMBER.match(one)]
        self._allowed: dict[int, Tensor | None] = {}

    def after(self, state: int, token: int) -> int:
        """Return the state after a token; `REFUSED` if it has a digit too many."""
        return self._walked(state, self._classes[token])

    def begun(self, begin: bytes, tokens: Sequence[int]) -> int:
        """Return the state after the last tokens of a text in which JSON comes behind `begin`."""
        _, found, rest = b"".join(map(self._text, tokens)).partition(begin)
        return self._walked(OUTSIDE, rest.translate(_CLASS)) if found else FREE

    def _walked(self, state: int, classes: bytes) -> int:
        for byte in classes:
            state = self._TABLE[state][byte]
            if state == REFUSED:
                break
        return state

    def allowed(self, state: int) -> Tensor | None:
        """Return the bits of the tokens that may follow a state, of the form of `Guide.fill`; None if all may."""
        if state == FREE:
            return None
        if state not in self._allowed:
            refused = [token for token in self._of_numbers if self.after(state, token) == REFUSED]
            mask = torch.empty((len(self._classes) + 31) // 32, dtype=torch.int32)
            if refused:
                allow_all_but(mask, refused)
            self._allowed[state] = mask if refused else None
        return self._allowed[state]
