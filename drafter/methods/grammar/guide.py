"""The state of one output under a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import LLMatcher
from torch import Tensor

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.bits import allow


class GrammarGuide(Guide):
    """A state of llguidance's parser. `eos` ends the output wherever the grammar accepts it."""

    def __init__(self, matcher: LLMatcher, eos: Collection[int]) -> None:
        self._matcher, self._eos = matcher, frozenset(eos)
        self._ended = False
        self._run: list[int] | None = None  # the forced tokens; None if not known

    def consume(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._eos:
            self._ended = self._matcher.is_accepting()
            return self._ended
        if not self._matcher.try_consume_tokens([token]):
            return False
        self._run = self._run[1:] if self._run and self._run[0] == token and len(self._run) > 1 else None
        return True

    def rewind(self, count: int) -> None:
        if not count:
            return
        if self._ended:
            self._ended, count = False, count - 1
        if count:
            self._matcher.rollback(count)
            self._run = None

    def forced(self) -> Sequence[int]:
        if self._ended:
            return ()
        if self._run is None:
            self._run = self._matcher.compute_ff_tokens()
            if not self._run and self._matcher.is_stopped() and len(self._eos) == 1 and self._matcher.is_accepting():
                self._run = list(self._eos)
        return self._run

    def fill(self, mask: Tensor) -> None:
        if self._ended:  # what comes now is not output
            allow(mask.zero_(), self._eos)
        elif self._matcher.is_error():
            mask.zero_()
        else:  # it sets all bits
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def problem(self) -> str | None:
        return self._matcher.get_error() if self._matcher.is_error() else None
