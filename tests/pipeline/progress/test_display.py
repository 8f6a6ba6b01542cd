"""A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from pipeline.progress.board import Progress
from pipeline.progress.watch import Bar, Lines, display


def test_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    lines = display(stream)
    assert isinstance(lines, Lines)
    lines.show(Progress("generating", total=8, rows=1))
    assert stream.getvalue() == ""  # it is too soon
    lines.show(Progress("finished", 8, before=3, rows=5, errors=2, tokens=1200, steps=480, seconds=2.0))
    assert stream.getvalue() == "8/8 rows, 2.5 rows/s, 600 tokens/s, 2.50 tokens a step, 00:00 left, 2 failed\n"


def test_a_bar_shows_the_same_figures() -> None:
    stream = io.StringIO()
    bar = Bar(stream)
    bar.show(Progress("generating", total=10, before=4, rows=1, tokens=40, seconds=2.0, recent_row_rate=0.5))
    assert "generating  50%|" in stream.getvalue()
    assert "| 5/10, 0.5 rows/s, 20 tokens/s, 00:10 left" in stream.getvalue()
    bar.show(Progress("failed", total=10, before=4, rows=1))
    assert "failed" in stream.getvalue()


def test_each_stage_of_the_start_has_one_line() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for stage in ("loading the model", "loading the model", "timing decode steps"):
        lines.show(Progress("starting", total=8, stage=stage))
    assert stream.getvalue() == "loading the model\ntiming decode steps\n"


def test_the_last_line_comes_once() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for _ in range(2):
        lines.show(Progress("finished", total=8, rows=8))
    assert stream.getvalue().count("8/8 rows") == 1


def test_a_bar_names_the_stage_of_the_start() -> None:
    stream = io.StringIO()
    Bar(stream).show(Progress("starting", total=8, stage="timing decode steps"))
    assert "timing decode steps   0%|" in stream.getvalue()
