"""Reasoning before a record: a grammar begins after the token that ends it, also where that lies inside a draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.bits import allow, allow_all_but
from drafter.text.reasoning import Reasoning


class AfterReasoning(Guide):
    """Lets all but the end of the output follow until reasoning has ended, and then what `inner` allows.

    Args:
        inside: Reasoning has begun; otherwise the first token decides whether it does.
    """

    def __init__(self, inner: Guide, reasoning: Reasoning, eos: Collection[int], *, inside: bool) -> None:
        assert reasoning.begin is not None
        self._begin, self._end = reasoning.begin, reasoning.end
        self._inner, self._eos, self._begins_inside = inner, frozenset(eos), inside
        self._free = 0  # tokens of reasoning, with both markers
        self._guided = 0  # tokens that `inner` has consumed
        self._over = False  # the last free token has ended it

    @property
    def _inside(self) -> bool:
        return not self._over and (self._begins_inside or self._free > 0)

    def consume(self, token: int) -> bool:
        begins = token == self._begin and not (self._over or self._guided)
        if self._inside or begins:
            if token in self._eos:
                return False
            self._free += 1
            self._over = token == self._end
            return True
        if not self._inner.consume(token):
            return False
        self._guided += 1
        return True

    def rewind(self, count: int) -> None:
        of_record = min(count, self._guided)
        self._inner.rewind(of_record)
        self._guided -= of_record
        if count > of_record:
            self._free -= count - of_record
            self._over = False

    def forced(self) -> Sequence[int]:
        return self._inner.forced() if self._over or self._guided else ()

    def fill(self, mask: Tensor) -> None:
        if self._inside:
            allow_all_but(mask, self._eos)
            return
        self._inner.fill(mask)
        if not (self._over or self._guided):
            allow(mask, [self._begin])

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def valid(self) -> bool:
        return self._inner.valid

    @property
    def problem(self) -> str | None:
        return self._inner.problem
