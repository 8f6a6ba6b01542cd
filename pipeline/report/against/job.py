"""The comparison job's entry: reads two outputs, prints what differs, and writes one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.errors import LoadError, one_line
from drafter.target.loading import load_tokenizer
from pipeline.command_line import run_job
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.report.against.audit import share_of
from pipeline.report.against.pairs import Comparison, DifferingRow, Span, compare_rows, differing_spans, rows_of
from pipeline.report.against.scorers import make_scorer
from pipeline.report.html_page import page_environment
from pipeline.report.output_files import open_output, read_run_of
from pipeline.report.rows import text_pieces

PAGE = "comparison.html"
_DESCRIPTION = """\
Compare two outputs of generation jobs, of the same prompts: how many rows have the same tokens, where the
others differ, and, with a scorer, whether one is worth more than the other.

  python -m jobs.compare exact lenient --scorer number --target answer
  python -m jobs.compare exact lenient --scorer score.py:is_right --page /tmp/comparison.html
  python -m jobs.compare exact --sample 1%           generates some rows again, without drafts, and shows differences"""
_COLUMNS = ("request_id", "token_ids")


@dataclass(frozen=True)
class CompareConfig:
    """A comparison.

    Args:
        first: Folder or URI of one output.
        second: Folder or URI of the other; None where one output is audited and nothing compared.
        scorer: Name of the scorer; see `make_scorer`. None compares tokens alone.
        target: Column with the right answer, for a built-in scorer.
        page: File or URI to write; by default in the second output.
        examples: How many differing rows to show.
        share: Of each output's rows, to be generated again by plain decoding; None for none.
    """

    first: str
    second: str | None = None
    scorer: str | None = None
    target: str | None = None
    page: str | None = None
    examples: int = 20
    share: float | None = None

    def __post_init__(self) -> None:
        if self.examples < 0:
            raise InputError(f"--examples must be at least 0, not {self.examples}")
        if self.second is None and self.share is None:
            raise InputError("there is one output: give another to compare it with, or --sample to audit it")
        if self.second is None and (self.scorer is not None or self.page is not None):
            raise InputError("an audit of one output has no scorer and no page: leave out --scorer and --page")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that a command line asks for; see `run_job` for what it returns.

    It returns 1, too, if an audit has found a difference.
    """
    audited_well = True

    def job(given: Sequence[str] | None) -> None:
        nonlocal audited_well
        config = parse_config(given)
        if config.second is not None:
            compare(config, config.second)
        if config.share is not None:
            audited_well = audit_outputs(config, config.share)

    return run_job(job, arguments) or int(not audited_well)


def parse_config(arguments: Sequence[str] | None = None) -> CompareConfig:
    """Return the comparison that a command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.compare", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="folder or URI of a generation job's results")
    parser.add_argument("second", nargs="?", help="the same of another job on the same prompts")
    parser.add_argument("--scorer", help="number, string, json, or FILE.py:function: what a row is worth")
    parser.add_argument("--target", help="column with the right answer, for number, string and json")
    parser.add_argument("--page", help=f"file or URI to write; by default {PAGE} in the second output")
    parser.add_argument("--examples", type=int, default=20, help="differing rows to show (20)")
    parser.add_argument("--sample", help="share of each output's rows to generate again plainly, such as 1%%")
    given = parser.parse_args(arguments)
    share = None if given.sample is None else share_of(given.sample)
    return CompareConfig(given.first, given.second, given.scorer, given.target, given.page, given.examples, share)


def audit_outputs(config: CompareConfig, share: float) -> bool:
    """Generate some rows of the outputs again, print what came of it, and return whether all are the same.

    Raises:
        InputError: An output is not exact, or its base cannot be loaded.
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

    Args:
        config: The comparison.
        second_uri: Its second output.

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
    """The base's tokeniser, if it is on this machine; it is not downloaded."""
    try:
        return load_tokenizer(model, local_files_only=True)
    except LoadError:
        print(f"tokens are shown as numbers: the tokenizer of {model} is not on this machine", file=sys.stderr)
        return None


def _summary(found: Comparison, config: CompareConfig) -> list[str]:
    """What was found, in lines."""
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


# ---- A comparison as one HTML page: it runs no script, needs no network, and escapes every text from the rows.


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
