"""Entry of the comparison job: reads two outputs, prints the differences, and writes one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.errors import LoadError, one_line
from drafter.text.tokenizers import load_tokenizer
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.report.against.config import PAGE, CompareConfig
from pipeline.report.against.pairs import Comparison, DifferingRow, Span, compare_rows, differing_spans, rows_of
from pipeline.report.against.scorers import make_scorer
from pipeline.report.html_page import page_environment
from pipeline.report.output_files import open_output, read_run_of
from pipeline.report.rows import text_pieces

_COLUMNS = ("request_id", "token_ids")


def compare_or_audit(config: CompareConfig) -> int:
    """Compare two outputs, or audit one or both; return 1 if an audit found a difference, otherwise 0."""
    if config.second is not None:
        compare(config, config.second)
    return int(config.share is not None and not audit_outputs(config, config.share))


def audit_outputs(config: CompareConfig, share: float) -> bool:
    """Audit the outputs, print the results, and return whether all repeated rows have the same tokens.

    Raises:
        InputError: An output is not exact, or its target model cannot be loaded.
        JobError: The generation failed.
    """
    from pipeline.report.against.audit import audit  # Ray takes seconds to import: a comparison does without

    same = True
    for uri in filter(None, [config.first, config.second]):
        found = audit(uri, share)
        print("\n".join(found.lines(uri)), flush=True)
        same &= not found.differences
    return same


def compare(config: CompareConfig, second_uri: str) -> None:
    """Read both outputs, print the summary and write the page.

    Raises:
        InputError: An output, the scorer or the page cannot be used.
    """
    outputs = [open_output(uri) for uri in (config.first, second_uri)]
    scorer = None if config.scorer is None else make_scorer(config.scorer, config.target)
    columns = None if scorer is not None else _COLUMNS
    first, second = (rows_of(output, columns) for output in outputs)
    found = compare_rows(first, second, scorer, config.examples)
    model = model_name(read_run_of(outputs[1])["config"]["model"])
    page_uri = config.page if config.page is not None else f"{second_uri.rstrip('/')}/{PAGE}"
    page = locate(page_uri)
    rows = shown_rows(found.shown, _tokenizer(model))
    try:
        page.write_text(render((config.first, second_uri), found, config.scorer, rows))
    except OSError as error:
        raise InputError(f"page {page_uri} cannot be written: {one_line(error)}") from error
    print("\n".join([*_summary(found, config), page.path]), flush=True)


def _tokenizer(model: str) -> Any:
    """The target model's tokenizer if it is on this machine; it is not downloaded."""
    try:
        return load_tokenizer(model, local_files_only=True)
    except LoadError:
        print(f"tokens are shown as numbers: the tokenizer of {model} is not on this machine", file=sys.stderr)
        return None


def _summary(found: Comparison, config: CompareConfig) -> list[str]:
    lines = [f"{found.rows:,} rows in both outputs, {found.identical:,} of them with the same tokens"]
    if found.only_first or found.only_second:
        lines.append(f"{found.only_first:,} rows only in {config.first}, {found.only_second:,} only in {config.second}")
    if found.earliest is not None:
        lines.append(f"earliest difference: row {found.earliest.name}, token {found.earliest.place}")
    if found.utility is not None and found.rows:
        difference = found.utility.difference
        margin = "" if difference.margin is None else f" ± {difference.margin:.4f} (95 %, paired)"
        lines.append(
            f"utility by {config.scorer}: {difference.first:.4f} and {difference.second:.4f}, "
            f"difference {difference.mean:+.4f}{margin}"
        )
    return lines


# The HTML page, without scripts and network access; texts from the rows are escaped.


@dataclass(frozen=True)
class ShownText:
    """Part of a row's text; `differs` where the other output lacks it."""

    text: str
    differs: bool


@dataclass(frozen=True)
class ShownRow:
    """A differing row, and its text in both outputs."""

    row: DifferingRow
    first: Sequence[ShownText]
    second: Sequence[ShownText]


def shown_rows(rows: Sequence[DifferingRow], tokenizer: Any) -> list[ShownRow]:
    """Return rows as texts in which the differing tokens are marked; `tokenizer` None shows token ids."""
    found = []
    for row in rows:
        ours, theirs = differing_spans(row.first["token_ids"], row.second["token_ids"])
        found.append(ShownRow(row, _texts(tokenizer, row.first, ours), _texts(tokenizer, row.second, theirs)))
    return found


def render(names: tuple[str, str], comparison: Comparison, scorer: str | None, rows: Sequence[ShownRow]) -> str:
    """Return the page as HTML; `names` are the two outputs' locations."""
    template = page_environment("pipeline.report.against").get_template("comparison.html.jinja")
    return template.render(names=names, comparison=comparison, scorer=scorer, rows=rows)


def _texts(tokenizer: Any, row: dict[str, Any], spans: Sequence[Span]) -> list[ShownText]:
    pieces = text_pieces(tokenizer, row["token_ids"])
    return [ShownText("".join(pieces[span.start : span.stop]), span.differs) for span in spans]
