"""Figures as bars on axes: where the ticks are, and what is between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_WIDTHS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
_MOST_BARS = 90


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        label: What it is about.
        value: How high it is.
        text: Its value for people.
    """

    label: str
    value: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Bars side by side over a scale from 0.

    Args:
        title: What is shown.
        unit: What a value counts.
        along: What the bars stand along.
        bars: From left to right.
        top: Where the scale ends.
        ticks: (value, text) on the scale.
        marks: (share of the width, text) below the bars; empty to label each bar.
    """

    title: str
    unit: str
    along: str
    bars: tuple[Bar, ...]
    top: float
    ticks: tuple[tuple[float, str], ...]
    marks: tuple[tuple[float, str], ...] = ()


def scale(highest: float, steps: int = 4) -> list[float]:
    """Round numbers from 0 to at least `highest`, about `steps` of them."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / steps
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(round_ * power for round_ in (1.0, 2.0, 2.5, 5.0, 10.0) if round_ * power >= rough * (1 - 1e-9))
    return [size * number for number in range(math.ceil(highest / size - 1e-9) + 1)]


def shares(title: str, along: str, values: list[tuple[str, float]]) -> Chart:
    """A chart of shares, 0 to 1."""
    ticks = scale(max((value for _, value in values), default=0.0))
    bars = tuple(Bar(label, value, f"{value:.1%}") for label, value in values)
    return Chart(title, "share of steps", along, bars, ticks[-1], tuple((tick, f"{tick:.0%}") for tick in ticks))


def rates_over_time(by_second: Mapping[int, tuple[int, int]]) -> Chart | None:
    """Tokens a second of the rows finished in each stretch of time; None without rows.

    Args:
        by_second: (rows, tokens) by second of the Unix epoch.
    """
    if not by_second:
        return None
    first, last = min(by_second), max(by_second)
    span = last - first + 1
    width = next((one for one in _WIDTHS if span / one <= _MOST_BARS), 86400 * math.ceil(span / 86400 / _MOST_BARS))
    begin = first - first % width
    number = (last - begin) // width + 1
    rows, tokens = [0] * number, [0] * number
    for second, (some_rows, some_tokens) in by_second.items():
        rows[(second - begin) // width] += some_rows
        tokens[(second - begin) // width] += some_tokens
    days = span > 86400
    bars = []
    for index in range(number):
        start, end = begin + index * width, begin + (index + 1) * width
        seconds = min(end, last + 1) - max(start, first)  # the outer ones are not whole
        rate = tokens[index] / seconds
        bars.append(Bar(_moment(start, days, width), rate, f"{rate:,.0f} tokens/s, {rows[index]:,} rows"))
    ticks = scale(max(bar.value for bar in bars))
    every = math.ceil(number / 6)
    marks = tuple((index / number, bars[index].label) for index in range(0, number, every))
    return Chart(
        f"Tokens a second, of the rows finished in each {_span(width)}",
        "tokens/s",
        "time (UTC)",
        tuple(bars),
        ticks[-1],
        tuple((tick, f"{tick:,.10g}") for tick in ticks),
        marks,
    )


def _moment(second: int, days: bool, width: int) -> str:
    form = "%H:%M:%S" if width < 60 else "%H:%M"
    return datetime.fromtimestamp(second, UTC).strftime(f"%d %b {form}" if days else form)


def _span(seconds: int) -> str:
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds % unit == 0:
            return name if seconds == unit else f"{seconds // unit} {name}s"
    return "second" if seconds == 1 else f"{seconds} seconds"
