"""What a grammar cannot say of JSON, also of that in calls: that numbers end, and what is only seen at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.digits import FREE, OUTSIDE, REFUSED, Digits


class RecordGuide(Guide):
    """Lets follow what `inner` does, without endless numbers.

    Args:
        digits: Follows the numbers.
        holds: Tells of the tokens of a whole text whether it is valid; None where all are.
        begin: What stands before JSON in a text that may have any other numbers before it.
    """

    def __init__(
        self,
        inner: Guide,
        digits: Digits,
        eos: Collection[int],
        holds: Callable[[Sequence[int]], bool] | None,
        begin: bytes = b"",
    ) -> None:
        self._inner, self._digits, self._eos, self._holds = inner, digits, frozenset(eos), holds
        self._tokens, self._begin = list[int](), begin
        # The state of `digits` before each token, and after the last.
        self._numbers = [FREE if begin else OUTSIDE]

    def consume(self, token: int) -> bool:
        state = self._after(token)
        if state == REFUSED or not self._inner.consume(token):
            return False
        self._tokens.append(token)
        self._numbers.append(state)
        return True

    def _after(self, token: int) -> int:
        state = self._numbers[-1]
        if token in self._eos:
            return state
        if state == FREE:  # what it looks for has a byte of each of so many tokens at most
            return self._digits.begun(self._begin, [*self._tokens[-len(self._begin) :], token])
        return self._digits.after(state, token)

    def rewind(self, count: int) -> None:
        self._inner.rewind(count)
        if count:
            del self._tokens[-count:], self._numbers[-count:]

    def forced(self) -> Sequence[int]:
        return self._inner.forced()

    def fill(self, mask: Tensor) -> None:
        self._inner.fill(mask)
        if not self.ended and (allowed := self._digits.allowed(self._numbers[-1])) is not None:
            mask &= allowed

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def valid(self) -> bool:
        whole = [token for token in self._tokens if token not in self._eos]
        return self.ended and (self._holds is None or self._holds(whole))

    @property
    def problem(self) -> str | None:
        return self._inner.problem
