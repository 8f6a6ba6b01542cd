"""Bar charts as data: bars and the round numbers of the scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drafter.errors import one_line
from drafter.statistics import DecodeCounts, mean_acceptance_length, per_second
from pipeline.learning.record import LearningRecord, Moment, together
from pipeline.output.folder import OutputFolder

_DAY = 86400
_WIDTHS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, _DAY]
"""Seconds that a bar may span."""
_MOST_BARS = 90
_TIME_MARKS = 6


@dataclass(frozen=True)
class Bar:
    """One bar; `text` is its value as people read it."""

    label: str
    value: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Bars side by side, over a scale from 0.

    Args:
        along: Meaning of the horizontal axis.
        top: Upper end of the scale.
        ticks: (value, text) of the lines on the scale.
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
    """Return round numbers from 0 to at least `highest`, in about `steps` steps."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / steps
    power = 10.0 ** math.floor(math.log10(rough))
    # Rounding errors must not add a step.
    size = next(digit * power for digit in (1.0, 2.0, 2.5, 5.0, 10.0) if digit * power >= rough * (1 - 1e-9))
    return [size * number for number in range(math.ceil(highest / size - 1e-9) + 1)]


def shares(title: str, along: str, values: list[tuple[str, float]]) -> Chart:
    """Return a chart of (label, share of the decode steps), each share from 0 to 1."""
    ticks = scale(max((value for _, value in values), default=0.0))
    bars = tuple(Bar(label, value, f"{value:.1%}") for label, value in values)
    return Chart(
        title, "share of steps", along, bars, ticks[-1], tuple((tick, f"{100 * tick:.10g}%") for tick in ticks)
    )


def rates_over_time(by_second: Mapping[int, tuple[int, int]]) -> Chart | None:
    """Chart new tokens a second over equal intervals, by `RowSummary.by_second`; None without rows."""
    if not by_second:
        return None
    first, last = min(by_second), max(by_second)
    width = _bar_width(last - first + 1)
    begin = first - first % width
    number = (last - begin) // width + 1
    rows, tokens = [0] * number, [0] * number
    for second, (some_rows, some_tokens) in by_second.items():
        rows[(second - begin) // width] += some_rows
        tokens[(second - begin) // width] += some_tokens
    with_days = last - first >= _DAY
    bars = []
    for index in range(number):
        start, end = begin + index * width, begin + (index + 1) * width
        seconds = min(end, last + 1) - max(start, first)  # the first and the last interval may be shorter
        rate = per_second(tokens[index], seconds)
        bars.append(Bar(_moment(start, width, with_days), rate, f"{rate:,.0f} tokens/s, {rows[index]:,} rows"))
    ticks = scale(max(bar.value for bar in bars))
    marks = tuple((index / number, bars[index].label) for index in range(0, number, math.ceil(number / _TIME_MARKS)))
    return Chart(
        f"Tokens a second, of the rows finished in each {_span(width)}",
        "tokens/s",
        "time (UTC)",
        tuple(bars),
        ticks[-1],
        tuple((tick, f"{tick:,.10g}") for tick in ticks),
        marks,
    )


def _bar_width(span: int) -> int:
    """Seconds of a bar that give at most `_MOST_BARS` bars."""
    return next((width for width in _WIDTHS if span / width <= _MOST_BARS), _DAY * math.ceil(span / _DAY / _MOST_BARS))


def _moment(second: int, width: int, with_day: bool) -> str:
    form = "%H:%M:%S" if width < 60 else "%H:%M"
    return datetime.fromtimestamp(second, UTC).strftime(f"%d %b {form}" if with_day else form)


def _span(seconds: int) -> str:
    """A number of seconds in words, in the largest unit that it is a multiple of."""
    for unit, name in ((_DAY, "day"), (3600, "hour"), (60, "minute")):
        if seconds % unit == 0:
            return name if seconds == unit else f"{seconds // unit} {name}s"
    return "second" if seconds == 1 else f"{seconds} seconds"


# Learning over time, from an output's `learning.json`, with the head's versions marked.

_MOST_MARKS = 12


def read_learning(output: OutputFolder, run: Mapping[str, Any]) -> LearningRecord | str | None:
    """Return the learner's record, or the reason why there is none; None where learning was off."""
    if not output.learning_file.exists:
        said = run.get("learning")
        return f"No learner has recorded anything. It was {said['state']}: {said['reason']}." if said else None
    try:
        return LearningRecord.of_json(output.learning_file.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{output.learning_file.name} is damaged: {one_line(error)}"


def learning_charts(record: LearningRecord) -> list[Chart]:
    """Return charts of acceptance length and tokens a second of all engines; empty before anything was decoded."""
    moments = together(record.moments, _MOST_BARS)
    if not moments:
        return []
    return [
        _chart("Acceptance length of all engines", "tokens a step", moments, _acceptance_length, 2),
        _chart(
            "Tokens a second of all engines", "tokens/s", moments, lambda one: per_second(one.tokens, one.seconds), 0
        ),
    ]


def _acceptance_length(one: Moment) -> float:
    return mean_acceptance_length(DecodeCounts(num_output_tokens=one.tokens, num_decode_steps=one.row_steps))


def _chart(title: str, unit: str, moments: list[Moment], value: Callable[[Moment], float], digits: int) -> Chart:
    bars, new, version = [], [], None
    for place, one in enumerate(moments):
        height, when = value(one), datetime.fromtimestamp(one.at, UTC).strftime("%H:%M:%S")
        drafted = "no version yet" if one.version is None else f"version {one.version}"
        learned = one.learned / one.seconds
        bars.append(Bar(when, height, f"{height:,.{digits}f}, {drafted}, learning {learned:.0%} of the time"))
        if one.version != version:
            new.append((place / len(moments), f"version {one.version}"))
            version = one.version
    ticks = scale(max(bar.value for bar in bars))
    marks = tuple(new[:: math.ceil(len(new) / _MOST_MARKS)]) if new else ((0.0, bars[0].label),)
    return Chart(
        f"{title}, and when there was a new version of the head",
        unit,
        "time (UTC)",
        tuple(bars),
        ticks[-1],
        tuple((tick, f"{tick:,.10g}") for tick in ticks),
        marks,
    )
