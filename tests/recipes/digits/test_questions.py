from __future__ import annotations

import random

import pytest
from PIL import Image

from recipes.digits import questions
from recipes.digits.questions import KINDS, add_digits, count_digits, largest_digit, read_digits, where_is
from recipes.digits.sheets import Sheet


def sheet_of(*rows: tuple[int, ...]) -> Sheet:
    return Sheet(Image.new("RGB", (8, 8)), rows, ((0, 0),) * sum(map(len, rows)))


STRIP, GRID = sheet_of((3, 7, 0, 7)), sheet_of((1, 2), (9, 1))


def test_what_a_sheet_says() -> None:
    assert read_digits(STRIP) == "The digits are 3, 7, 0, 7."
    assert read_digits(GRID) == "Row 1 is 1, 2. Row 2 is 9, 1."


@pytest.mark.parametrize(
    ("digits", "answer"),
    [
        ([3, 7, 0], "3 + 7 = 10, 10 + 0 = 10. The sum is 10."),
        ([5], "The sum is 5."),
    ],
)
def test_sums_are_worked_out(digits: list[int], answer: str) -> None:
    assert add_digits(digits) == answer


def test_where_digits_are() -> None:
    assert largest_digit(STRIP) == "The largest digit is 7, in column 2."
    assert largest_digit(GRID) == "The largest digit is 9, in row 2, column 1."
    assert where_is(STRIP, 7) == "The 7 is in column 2 and in column 4."
    assert where_is(GRID, 1) == "The 1 is in row 1, column 1 and in row 2, column 2."
    assert where_is(GRID, 5) == "There is no 5."


def test_how_many_digits_there_are() -> None:
    assert count_digits(STRIP) == "There are 4 digits."
    assert count_digits(sheet_of((4,))) == "There is 1 digit."
    assert count_digits(GRID) == "There are 4 digits, in 2 rows of 2."


def test_questions_about_a_sheet_are_of_different_kinds() -> None:
    asked = questions.questions(random.Random(0), GRID, 5)
    assert {question.kind for question in asked} == set(KINDS)
    assert all(question.text and question.answer for question in asked)


def test_a_question_about_several_sheets_names_them() -> None:
    question = questions.question_of_several(random.Random(0), [STRIP, GRID])
    assert question.answer == "Image 1: The digits are 3, 7, 0, 7. Image 2: Row 1 is 1, 2. Row 2 is 9, 1."
