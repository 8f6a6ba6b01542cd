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
    lines.show(Progress("finished", 8, before=3, rows=5, errors=2, tokens=10, steps=4, row_rate=2.0, token_rate=1200.0))
    assert stream.getvalue() == "8/8 rows, 2.0 rows/s, 1,200 tokens/s, β 2.50, 00:00 left, 2 errors\n"


def test_a_bar_shows_the_same_figures() -> None:
    stream = io.StringIO()
    bar = Bar(stream)
    bar.show(Progress("generating", total=10, before=4, rows=1, row_rate=0.5, token_rate=20.0))
    assert "generating  50%|" in stream.getvalue()
    assert "| 5/10, 0.5 rows/s, 20 tokens/s, 00:10 left" in stream.getvalue()
    bar.show(Progress("failed", total=10, before=4, rows=1))
    assert "failed" in stream.getvalue()
