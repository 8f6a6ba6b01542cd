"""The state of one output under a grammar, what no grammar can say of it, and reasoning before it, also in a draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial

from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from drafter.acceptance.guide import Guide, PutOff
from drafter.methods.grammar.bits import allow, allow_all_but
from drafter.methods.grammar.compiling import MOST_FORCED, TOO_MUCH_FORCED
from drafter.methods.grammar.digits import FREE, OUTSIDE, REFUSED, Digits
from drafter.text.reasoning import Reasoning

_MANY = 32  # masks from which on llguidance's threads make them: waking threads takes as long as some masks
_STUCK: Sequence[int] = (-1,)  # the forced run where there are more bytes than that: no token can be the next one


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
        self.failed: str | None = None  # why a copy of the parser could make no mask

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

    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        if self._ended:  # what comes now is not output
            allow(mask.zero_(), self._eos)
        elif (run := self._known()) is _STUCK or self._matcher.is_error():
            mask.zero_()
        elif run:
            allow(mask.zero_(), [run[self._place]])
        elif later is None:
            fill_masks([(self, self._matcher, mask)])
        else:
            later.together(fill_masks, (self, self._matcher.deep_copy(), mask))

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def problem(self) -> str | None:
        if self._matcher.is_error():
            return self._matcher.get_error()
        if self.failed is not None:
            return self.failed
        return TOO_MUCH_FORCED if self._run is _STUCK else None


def fill_masks(pieces: list[tuple[GrammarGuide, LLMatcher, Tensor]]) -> None:
    """Set all bits of masks by parsers; in llguidance's threads where they are many and at regular places."""
    places = [mask.data_ptr() for _, _, mask in pieces]
    first, size = min(places), pieces[0][2].nbytes
    if len(pieces) < _MANY or any((place - first) % size for place in places):
        for _, matcher, mask in pieces:
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), size)
    else:
        at = [(matcher, (place - first) // size) for (_, matcher, _), place in zip(pieces, places, strict=True)]
        _executor().unsafe_compute_mask_ptr(at, first, size, 1 + max(number for _, number in at))
    for guide, matcher, _ in pieces:
        if matcher.is_error():
            guide.failed = matcher.get_error()


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _GuideAround(Guide):
    """What `inner` says, changed."""

    def __init__(self, inner: Guide) -> None:
        self._inner = inner

    def forced(self) -> Sequence[int]:
        return self._inner.forced()

    def _then(self, work: Callable[[], object], later: PutOff | None) -> None:
        """Do what comes after `inner` has filled its mask."""
        if later is None:
            work()
        else:
            later.after(work)

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def valid(self) -> bool:
        return self._inner.valid

    @property
    def problem(self) -> str | None:
        return self._inner.problem


class RecordGuide(_GuideAround):
    """Lets follow what `inner` does, without endless numbers; what is only seen at a text's end decides if it is valid.

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
        super().__init__(inner)
        self._digits, self._eos, self._holds = digits, frozenset(eos), holds
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

    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        self._inner.fill(mask, later)
        if not self.ended and (allowed := self._digits.allowed(self._numbers[-1])) is not None:
            self._then(partial(mask.bitwise_and_, allowed), later)

    @property
    def valid(self) -> bool:
        whole = [token for token in self._tokens if token not in self._eos]
        return self.ended and (self._holds is None or self._holds(whole))


class AfterReasoning(_GuideAround):
    """Lets all but the end of the output follow until reasoning has ended, and then what `inner` allows.

    Args:
        inside: Reasoning has begun; otherwise the first token decides whether it does.
    """

    def __init__(self, inner: Guide, reasoning: Reasoning, eos: Collection[int], *, inside: bool) -> None:
        super().__init__(inner)
        assert reasoning.begin is not None
        self._begin, self._end = reasoning.begin, reasoning.end
        self._eos, self._begins_inside = frozenset(eos), inside
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

    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        if self._inside:
            allow_all_but(mask, self._eos)
            return
        self._inner.fill(mask, later)
        if not (self._over or self._guided):
            self._then(partial(allow, mask, [self._begin]), later)
