"""The state of one output under a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import LLMatcher
from torch import Tensor

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.bits import allow
from drafter.methods.grammar.compiling import MOST_FORCED, TOO_MUCH_FORCED

_STUCK: Sequence[int] = (-1,)
"""The forced run where there are more bytes than that: no token can be the next one."""


class GrammarGuide(Guide):
    """A state of llguidance's parser. `eos` ends the output wherever the grammar accepts it.

    What is forced is worked out where it begins and then followed, token by token, without the parser, which would
    tokenise all the rest of it at each. The parser stands where the forced run has begun. What may follow an output
    depends on nothing but the output, whatever else has been asked and taken back.
    """

    def __init__(self, matcher: LLMatcher, eos: Collection[int]) -> None:
        self._matcher, self._eos = matcher, frozenset(eos)
        self._ended = False
        self._run: Sequence[int] | None = None  # the forced tokens, none where there is a choice; None if not known
        self._place = 0  # of them have come
        self._before: list[tuple[Sequence[int], int]] = []  # earlier runs, with what came of each

    def consume(self, token: int) -> bool:
        if self._ended:
            return False
        run = self._known()
        if (run and token != run[self._place]) or (token in self._eos and not self._matcher.is_accepting()):
            return False
        if token in self._eos:
            self._ended = True
            return True
        ahead = [*run[: self._place], token]
        if self._place + 1 < len(run):
            self._place += 1
        elif (taken := self._matcher.try_consume_tokens(ahead)) < len(ahead):
            self._matcher.rollback(taken)  # in vain if its work has become too much
            return False
        else:
            self._before.append((run, len(ahead)))
            self._run, self._place = None, 0
        return True

    def rewind(self, count: int) -> None:
        if count and self._ended:
            self._ended, count = False, count - 1
        back = 0
        while count > self._place:
            count -= self._place
            self._run, self._place = self._before.pop()
            back += self._place
        self._place -= count
        if back:
            self._matcher.rollback(back)

    def forced(self) -> Sequence[int]:
        return () if self._ended or (run := self._known()) is _STUCK else run[self._place :]

    def _known(self) -> Sequence[int]:
        if self._run is None:
            few = len(self._matcher.compute_ff_bytes()) <= MOST_FORCED
            self._run = self._matcher.compute_ff_tokens() if few else _STUCK
            if not self._run and self._matcher.is_stopped() and len(self._eos) == 1 and self._matcher.is_accepting():
                self._run = list(self._eos)
        return self._run

    def fill(self, mask: Tensor) -> None:
        if self._ended:  # what comes now is not output
            allow(mask.zero_(), self._eos)
        elif (run := self._known()) is _STUCK or self._matcher.is_error():
            mask.zero_()
        elif run:
            allow(mask.zero_(), [run[self._place]])
        else:  # it sets all bits
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def problem(self) -> str | None:
        if self._matcher.is_error():
            return self._matcher.get_error()
        return TOO_MUCH_FORCED if self._run is _STUCK else None
