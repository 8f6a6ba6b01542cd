"""Sheets of paper with handwritten digits, in one row or in several, drawn from the images of `data/digits`."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image

DATA = Path(__file__).resolve().parents[2] / "data" / "digits" / "digits.csv.gz"
HELD_OUT_SHARE = 0.1
"""Share of the digits that no model learns from."""
COLUMNS, ROWS = 4, 3
"""The most digits of a row, and the most rows."""
CELL = 32
"""Side of the square that a digit is in, in pixels. All sheets are as wide as the longest row."""
_INK, _DIGIT = 16, 28


@dataclass(frozen=True)
class Glyph:
    """One handwritten digit.

    Args:
        pixels: `[8, 8]` bytes, from 0 (paper) to 16 (ink).
        digit: What it says.
    """

    pixels: np.ndarray
    digit: int

    @property
    def held_out(self) -> bool:
        """Whether no model may learn from it."""
        return zlib.crc32(self.pixels.tobytes()) < HELD_OUT_SHARE * 2**32


@dataclass(frozen=True)
class Sheet:
    """A sheet of digits.

    Args:
        image: How it looks, in RGB.
        rows: Its digits, row by row; all rows have the same length.
        corners: Where the square of each digit begins, in pixels from the left and from the top, in reading order.
    """

    image: Image.Image
    rows: tuple[tuple[int, ...], ...]
    corners: tuple[tuple[int, int], ...]

    @property
    def digits(self) -> list[int]:
        """All digits in reading order."""
        return [digit for row in self.rows for digit in row]


@cache
def glyphs(*, held_out: bool) -> tuple[Glyph, ...]:
    """Return all handwritten digits that are held out, or all others."""
    with pyarrow.input_stream(str(DATA)) as text:  # it unpacks what is compressed
        table = np.loadtxt(text.read().decode().splitlines(), delimiter=",", dtype=np.uint8)
    found = [Glyph(line[:64].reshape(8, 8), int(line[64])) for line in table]
    return tuple(glyph for glyph in found if glyph.held_out == held_out)


def draw_sheet(rng: random.Random, some: Sequence[Glyph], *, strip: bool | None = None) -> Sheet:
    """Draw a sheet with digits at random.

    Args:
        rng: Draws.
        some: The digits to draw from.
        strip: Whether it has one row; at random by default.
    """
    if rng.random() < 0.6 if strip is None else strip:
        height, width = 1, rng.randint(1, COLUMNS)
    else:
        height, width = rng.randint(2, ROWS), rng.randint(2, COLUMNS)
    chosen = [[rng.choice(some) for _ in range(width)] for _ in range(height)]
    high = height + height % 2  # padded to a square, it begins where one of the square's quarters does
    ink = np.zeros((high * CELL, COLUMNS * CELL), np.float32)
    left, top = rng.randint(0, COLUMNS - width), rng.randint(0, high - height)
    corners = [((left + column) * CELL, (top + row) * CELL) for row in range(height) for column in range(width)]
    for (x, y), glyph in zip(corners, [glyph for line in chosen for glyph in line], strict=True):
        x, y = x + rng.randint(0, CELL - _DIGIT), y + rng.randint(0, CELL - _DIGIT)
        ink[y : y + _DIGIT, x : x + _DIGIT] = _written(rng, glyph)
    paper, pen = rng.randint(215, 255), rng.randint(0, 70)
    grey = (paper - ink * (paper - pen)).round().astype(np.uint8)
    rows = tuple(tuple(glyph.digit for glyph in line) for line in chosen)
    return Sheet(Image.fromarray(grey).convert("RGB"), rows, tuple(corners))


def _written(rng: random.Random, glyph: Glyph) -> np.ndarray:
    """Return the ink `[_DIGIT, _DIGIT]`, from 0 to 1, of a digit a little turned, slanted, and larger or smaller."""
    small = Image.fromarray(glyph.pixels.astype(np.float32) / _INK)
    turn, slant = rng.uniform(-0.12, 0.12), rng.uniform(-0.15, 0.15)
    step = 8 / (_DIGIT * rng.uniform(0.85, 1.1))
    # Pillow asks for each pixel of the large image where it is in the small one; the centres are the same place.
    (a, b), (c, d) = (step, step * (slant - turn)), (step * turn, step)
    matrix = (a, b, 4 - (a + b) * _DIGIT / 2, c, d, 4 - (c + d) * _DIGIT / 2)
    large = small.transform((_DIGIT, _DIGIT), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    return np.asarray(large).clip(0, 1) ** rng.uniform(0.7, 1.3)
