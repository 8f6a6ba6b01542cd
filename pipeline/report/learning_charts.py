"""What a head that learnt brought, over time: from an output's `learning.json`, with its versions marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from drafter.errors import one_line
from drafter.statistics import DecodeCounts, mean_acceptance_length, per_second
from pipeline.learning.learning_record import LearningRecord, Moment, together
from pipeline.output.output_folder import OutputFolder
from pipeline.report.charts import Bar, Chart, scale

_MOST_BARS = 90
_MOST_MARKS = 12


def read_learning(output: OutputFolder, run: Mapping[str, Any]) -> LearningRecord | str | None:
    """Return what a learner recorded, or why there is nothing; None where no head was to learn.

    Args:
        output: The output.
        run: Its `run.json`.
    """
    if not output.learning_file.exists:
        said = run.get("learning")
        return f"No learner has recorded anything. It was {said['state']}: {said['reason']}." if said else None
    try:
        return LearningRecord.of_json(output.learning_file.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{output.learning_file.name} is damaged: {one_line(error)}"


def learning_charts(record: LearningRecord) -> list[Chart]:
    """Return charts of acceptance length and tokens a second of all engines; none before anything was decoded."""
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
