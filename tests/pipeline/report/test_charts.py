from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.page import rates_over_time, scale, shares
from tests.pipeline.report.outputs import BEGUN


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0.0, [0.0, 1.0]),
        (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.17, [0.0, 0.05, 0.1, 0.15, 0.2]),
        (655.0, [0.0, 200.0, 400.0, 600.0, 800.0]),
    ],
)
def test_scales_are_round(highest: float, ticks: list[float]) -> None:
    assert scale(highest) == pytest.approx(ticks)


@given(st.floats(1e-6, 1e12))
def test_scales_hold_what_they_measure(highest: float) -> None:
    ticks = scale(highest)
    assert highest <= ticks[-1] * (1 + 1e-6)
    assert 3 <= len(ticks) <= 6


def test_rates_over_time_are_tokens_by_the_seconds_there_were() -> None:
    second = int(BEGUN.timestamp())
    assert rates_over_time({}) is None
    chart = rates_over_time({second: (1, 30), second + 2: (2, 60)})
    assert chart is not None
    assert [bar.value for bar in chart.bars] == [30.0, 0.0, 60.0]
    assert chart.bars[2].text == "60 tokens/s, 2 rows finished"
    assert chart.marks[0] == (0.0, "03:04:05")
    # Long jobs get wider bars; the outer ones count only the seconds that there were.
    hours = rates_over_time({second + index: (1, 10) for index in range(7200)})
    assert hours is not None
    assert len(hours.bars) <= 90
    assert {bar.value for bar in hours.bars} == {10.0}
    assert "in each 2 minutes" in hours.title
    years = rates_over_time({0: (1, 86400), 10**9: (1, 5)})
    assert years is not None
    assert len(years.bars) <= 91


def test_shares_are_labelled() -> None:
    chart = shares("t", "depth", [("1", 0.5), ("2", 0.125)])
    assert [(bar.label, bar.text) for bar in chart.bars] == [("1", "50.0%"), ("2", "12.5%")]
    assert chart.ticks[-1][1] == "60%"
    small = shares("t", "depth", [("1", 0.0093), ("2", 0.003)])
    assert [text for _, text in small.ticks] == ["0%", "0.25%", "0.5%", "0.75%", "1%"]
