"""A comparison as one HTML page: it runs no script, needs no network, and escapes every text from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.compare.compared_rows import Comparison, DifferingRow
from pipeline.compare.token_differences import Span, differing_spans
from pipeline.report.html_page import page_environment
from pipeline.report.row_steps import text_pieces


@dataclass(frozen=True)
class ShownText:
    """A run of a row's text.

    Args:
        text: The text.
        differs: Whether the other output lacks it there.
    """

    text: str
    differs: bool


@dataclass(frozen=True)
class ShownRow:
    """A differing row in both outputs.

    Args:
        row: The row.
        first: Its text in one output.
        second: Its text in the other.
    """

    row: DifferingRow
    first: Sequence[ShownText]
    second: Sequence[ShownText]


def shown_rows(rows: Sequence[DifferingRow], tokenizer: Any) -> list[ShownRow]:
    """Return rows as texts in which the differing tokens are marked.

    Args:
        rows: Differing rows.
        tokenizer: Of the base; None shows tokens as numbers.
    """
    found = []
    for row in rows:
        ours, theirs = differing_spans(row.first["token_ids"], row.second["token_ids"])
        found.append(ShownRow(row, _texts(tokenizer, row.first, ours), _texts(tokenizer, row.second, theirs)))
    return found


def render(names: tuple[str, str], comparison: Comparison, scorer: str | None, rows: Sequence[ShownRow]) -> str:
    """Return the page as HTML.

    Args:
        names: Where the two outputs are.
        comparison: What was found.
        scorer: Name of the scorer.
        rows: Differing rows to show.
    """
    template = page_environment("pipeline.compare").get_template("comparison.html.jinja")
    return template.render(names=names, comparison=comparison, scorer=scorer, rows=rows)


def _texts(tokenizer: Any, row: dict[str, Any], spans: Sequence[Span]) -> list[ShownText]:
    pieces = text_pieces(tokenizer, row["token_ids"])
    return [ShownText("".join(pieces[span.start : span.stop]), span.differs) for span in spans]
