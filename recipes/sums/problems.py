"""Sums of four numbers, worked out in words. There are many ways to say each step, and one right total.

So a draft may say a step in other words than the base, which is harmless, or get a total wrong, which is not.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

TERMS, LARGEST = 4, 9
_TEST_SHARE = 0.15
_FIRST = (
    "we begin with the number {term} .",
    "the first of the numbers is {term} .",
    "to start , there is a {term} .",
)
_NEXT = (
    "adding the next number {term} to what we have gives {total} .",
    "then {term} more on top of all this makes {total} .",
    "with another {term} the sum so far has become {total} .",
    "now {term} is added and the result of it is {total} .",
)
_LAST = ("so the answer is {total}", "hence the answer is {total}", "therefore the answer is {total}")


@dataclass(frozen=True)
class Problem:
    """A sum.

    Args:
        terms: The numbers to add.
    """

    terms: tuple[int, ...]

    @property
    def question(self) -> str:
        """The sum as a prompt."""
        return f"{' + '.join(map(str, self.terms))} ="

    @property
    def total(self) -> int:
        """What is right."""
        return sum(self.terms)

    @property
    def held_out(self) -> bool:
        """Whether nobody may learn from it."""
        return zlib.crc32(self.question.encode()) < _TEST_SHARE * 2**32

    def worked_out(self, rng: random.Random, taste: int = 0) -> str:
        """Return an answer that is right, in words drawn by `rng`.

        Args:
            rng: Draws.
            taste: How many times the first wording of each step is in the lot once more.
        """
        first, following, last = ((some[0],) * taste + some for some in (_FIRST, _NEXT, _LAST))
        total, said = self.terms[0], [rng.choice(first).format(term=self.terms[0])]
        for term in self.terms[1:]:
            total += term
            said.append(rng.choice(following).format(term=term, total=total))
        return " ".join([*said, rng.choice(last).format(total=total)])


def problems(*, held_out: bool) -> list[Problem]:
    """Return all sums that are held out, or all others, in an order of no meaning."""
    found = [Problem(terms) for terms in product(range(1, LARGEST + 1), repeat=TERMS)]
    found = [problem for problem in found if problem.held_out == held_out]
    random.Random(0).shuffle(found)
    return found


def words() -> list[str]:
    """Return every word of questions and answers, in order."""
    texts = [*_FIRST, *_NEXT, *_LAST, "+ ="]
    numbers = [str(number) for number in range(TERMS * LARGEST + 1)]
    return sorted({word for text in texts for word in text.split() if not word.startswith("{")}) + numbers


def training_texts(seed: int, taste: int) -> Iterator[tuple[str, str]]:
    """Yield questions and answers without end, of problems that are not held out; see `Problem.worked_out`."""
    rng, some = random.Random(seed), problems(held_out=False)
    while True:
        problem = rng.choice(some)
        yield problem.question, problem.worked_out(rng, taste)
