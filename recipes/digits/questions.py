"""Questions about sheets of digits in a small language, and their answers, which are worked out in words."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from recipes.digits.sheets import Sheet, draw_sheet, glyphs

_READ = ("Read the digits.", "What do you see?", "Read it.")
_ADD = ("Add the digits.", "What is the sum of the digits?", "Add it.")
_LARGEST = ("Which digit is the largest?", "Where is the largest digit?")
_WHERE = ("Where is the {digit}?", "Is there a {digit}?")
_COUNT = ("How many digits are there?", "Count the digits.")


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    Args:
        kind: `read`, `add`, `largest`, `where` or `count`.
        text: The question.
        answer: What is right.
    """

    kind: str
    text: str
    answer: str


def read_digits(sheet: Sheet) -> str:
    """Return what a sheet says, row by row."""
    if len(sheet.rows) == 1:
        return f"The digits are {_listed(sheet.digits)}."
    return " ".join(f"Row {number} is {_listed(row)}." for number, row in enumerate(sheet.rows, 1))


def add_digits(digits: Sequence[int]) -> str:
    """Return the sum of some digits, worked out step by step."""
    total, steps = digits[0], []
    for digit in digits[1:]:
        steps.append(f"{total} + {digit} = {total + digit}")
        total += digit
    return " ".join([", ".join(steps) + "."] * bool(steps) + [f"The sum is {total}."])


def largest_digit(sheet: Sheet) -> str:
    """Return the largest digit, and where it is first."""
    digit = max(sheet.digits)
    return f"The largest digit is {digit}, in {_place(sheet, _places(sheet, digit)[0])}."


def where_is(sheet: Sheet, digit: int) -> str:
    """Return all places of a digit."""
    places = [_place(sheet, place) for place in _places(sheet, digit)]
    return f"The {digit} is in {' and in '.join(places)}." if places else f"There is no {digit}."


def count_digits(sheet: Sheet) -> str:
    """Return how many digits a sheet has."""
    rows, columns = len(sheet.rows), len(sheet.rows[0])
    if rows == 1:
        return "There is 1 digit." if columns == 1 else f"There are {columns} digits."
    return f"There are {rows * columns} digits, in {rows} rows of {columns}."


def questions(rng: random.Random, sheet: Sheet, number: int) -> list[Question]:
    """Return different questions about a sheet, in an order drawn by `rng`, at most five.

    Args:
        rng: Draws.
        sheet: The sheet.
        number: How many.
    """
    kinds = list(_KINDS)
    rng.shuffle(kinds)
    return [_KINDS[kind](rng, sheet) for kind in kinds[:number]]


def question_of(kind: str, rng: random.Random, sheet: Sheet) -> Question:
    """Return a question of one kind about a sheet."""
    return _KINDS[kind](rng, sheet)


def unseen(number: int, seed: int) -> Iterator[tuple[Sheet, Question]]:
    """Yield sheets of held-out digits with a question about each, of all kinds in turn."""
    rng = random.Random(seed)
    for place in range(number):
        sheet = draw_sheet(rng, glyphs(held_out=True))
        yield sheet, question_of(KINDS[place % len(KINDS)], rng, sheet)


def question_of_several(rng: random.Random, sheets: Sequence[Sheet]) -> Question:
    """Return a question about several sheets at once."""
    read = " ".join(f"Image {number}: {read_digits(sheet)}" for number, sheet in enumerate(sheets, 1))
    return Question("read", rng.choice(_READ), read)


def question_of_none(rng: random.Random) -> Question:
    """Return a question that can be answered without any sheet."""
    digits = [rng.randrange(10) for _ in range(rng.randint(2, 6))]
    return Question("add", f"Add {_listed(digits)}.", add_digits(digits))


def _read(rng: random.Random, sheet: Sheet) -> Question:
    return Question("read", rng.choice(_READ), read_digits(sheet))


def _add(rng: random.Random, sheet: Sheet) -> Question:
    return Question("add", rng.choice(_ADD), add_digits(sheet.digits))


def _largest(rng: random.Random, sheet: Sheet) -> Question:
    return Question("largest", rng.choice(_LARGEST), largest_digit(sheet))


def _where(rng: random.Random, sheet: Sheet) -> Question:
    digit = rng.choice(sheet.digits) if rng.random() < 0.7 else rng.randrange(10)
    return Question("where", rng.choice(_WHERE).format(digit=digit), where_is(sheet, digit))


def _count(rng: random.Random, sheet: Sheet) -> Question:
    return Question("count", rng.choice(_COUNT), count_digits(sheet))


_KINDS: dict[str, Callable[[random.Random, Sheet], Question]] = {
    "read": _read,
    "add": _add,
    "largest": _largest,
    "where": _where,
    "count": _count,
}
KINDS = tuple(_KINDS)


def _listed(digits: Sequence[int]) -> str:
    return ", ".join(map(str, digits))


def _places(sheet: Sheet, digit: int) -> list[tuple[int, int]]:
    """Return row and column, from 1, of each place of a digit, in reading order."""
    return [(r, c) for r, row in enumerate(sheet.rows, 1) for c, one in enumerate(row, 1) if one == digit]


def _place(sheet: Sheet, place: tuple[int, int]) -> str:
    row, column = place
    return f"column {column}" if len(sheet.rows) == 1 else f"row {row}, column {column}"
