from __future__ import annotations

import random

import numpy as np

from recipes.digits.sheets import CELL, COLUMNS, ROWS, draw_sheet, glyphs


def test_digits_that_are_held_out_are_no_others() -> None:
    known, held_out = ({glyph.pixels.tobytes() for glyph in glyphs(held_out=out)} for out in (False, True))
    assert not known & held_out
    assert len(glyphs(held_out=False)) + len(glyphs(held_out=True)) == 1_797
    assert {glyph.digit for glyph in glyphs(held_out=True)} == set(range(10))
    assert max(int(glyph.pixels.max()) for glyph in glyphs(held_out=True)) == 16


def test_each_digit_is_where_the_sheet_says_and_nothing_else_is() -> None:
    rng = random.Random(0)
    shapes = set()
    for _ in range(60):
        sheet = draw_sheet(rng, glyphs(held_out=True))
        shapes.add((len(sheet.rows), len(sheet.rows[0])))
        paper = np.asarray(sheet.image.convert("L")).astype(int)
        ink = paper.max() - paper > 60
        for x, y in sheet.corners:
            square = ink[y : y + CELL, x : x + CELL]
            assert square.shape == (CELL, CELL)
            assert square.sum() > 15
            square[:] = False
        assert not ink.any()
    assert {shape for shape in shapes if shape[0] == 1} == {(1, columns) for columns in range(1, COLUMNS + 1)}
    assert {shape[0] for shape in shapes} == set(range(1, ROWS + 1))


def test_one_seed_draws_one_sheet() -> None:
    first, second, other = (draw_sheet(random.Random(seed), glyphs(held_out=True)) for seed in (1, 1, 2))
    assert first == second
    assert first.image.tobytes() != other.image.tobytes()
