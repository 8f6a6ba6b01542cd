"""The comparison job: pairs the rows of two outputs, compares their tokens, and writes the differences as one page."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from heapq import nsmallest
from itertools import zip_longest
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from drafter.errors import without_secrets
from pipeline.cluster.model_copies import model_name
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import NAMED_BY
from pipeline.report.config import CompareConfig
from pipeline.report.outputs import Row, first_difference, open_output, open_rows, read_run_of, rows_of
from pipeline.report.page import MarkedText, local_tokenizer, render, text_pieces, write_page
from pipeline.report.scorers import Scorer, make_scorer

Span = tuple[int, int, bool]
"""First token of a part of one of two sequences, the one after its last, and whether the other sequence lacks them."""
_COLUMNS = ("request_id", "token_ids")
_PROMPT, _PAIR = "prompt_token_ids", "pair"


def differing_spans(first: Sequence[int], second: Sequence[int]) -> tuple[list[Span], list[Span]]:
    """Split both sequences into common and differing spans, by their longest common runs."""
    ours, theirs = list[Span](), list[Span]()
    for tag, start, stop, other_start, other_stop in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for spans, begin, end in ((ours, start, stop), (theirs, other_start, other_stop)):
            if begin < end:
                spans.append((begin, end, tag != "equal"))
    return ours, theirs


@dataclass
class RowPairs:
    """Pairs of rows with the same value in the column `by`. Outputs of the same input have the same order, or nearly.

    Only rows without their counterpart are in memory. Once all pairs have been taken, `only_first` and `only_second`
    have the rows, by that value, that the other output lacks.
    """

    first: Iterator[Row]
    second: Iterator[Row]
    by: str = "request_id"
    only_first: dict[str, Row] = field(default_factory=dict)
    only_second: dict[str, Row] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Row, Row]]:
        for ours, theirs in zip_longest(self.first, self.second):
            if ours is not None:
                self.only_first[ours[self.by]] = ours
            if theirs is not None:
                self.only_second[theirs[self.by]] = theirs
            for row in (ours, theirs):
                name = None if row is None else row[self.by]
                if name in self.only_first and name in self.only_second:
                    yield self.only_first.pop(name), self.only_second.pop(name)


def paired_by_prompt(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows with a column `pair`: their prompt's tokens and images, and the row's number among those of it."""
    seen = Counter[bytes]()
    for row in rows:
        images = [image["digest"] for image in row.get(PROMPT_IMAGES) or ()]
        prompt = hashlib.blake2b(repr((row[_PROMPT], images)).encode(), digest_size=16).digest()
        yield row | {_PAIR: (prompt, seen[prompt])}
        seen[prompt] += 1


@dataclass(frozen=True)
class DifferingRow:
    """A row whose tokens first differ at `place`, with its utilities in both outputs; None without a scorer."""

    first: Row
    second: Row
    place: int
    scores: tuple[float, float] | None

    @property
    def name(self) -> str:
        return str(self.first["request_id"])

    def texts(self, tokenizer: Any) -> list[list[MarkedText]]:
        """Return the row's text in both outputs with the differing tokens marked; `tokenizer` None shows token ids."""
        spans = differing_spans(self.first["token_ids"], self.second["token_ids"])
        return [_marked(tokenizer, *one) for one in zip((self.first, self.second), spans, strict=True)]


def _marked(tokenizer: Any, row: Row, spans: Sequence[Span]) -> list[MarkedText]:
    pieces = text_pieces(tokenizer, row["token_ids"])
    return [MarkedText("".join(pieces[start:stop]), "differs" if differs else "") for start, stop, differs in spans]


@dataclass(frozen=True)
class Utilities:
    """Mean utilities of paired rows. `margin` is half the 95 % interval of their difference; None for a single row."""

    first: float
    second: float
    margin: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Utilities:
        ours, theirs = zip(*pairs, strict=True)
        differences = [second - first for first, second in pairs]
        margin = 1.96 * stdev(differences) / sqrt(len(pairs)) if len(pairs) > 1 else None
        return cls(fmean(ours), fmean(theirs), margin)

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass
class Comparison:
    """Result of a comparison of two outputs: of `rows` that both have, `identical` ones have the same tokens.

    `earliest` is the row with the earliest difference, and `shown` are some of the differing rows, drawn by name.
    `utility` is None without a scorer, or without rows.
    """

    rows: int = 0
    identical: int = 0
    only_first: int = 0
    only_second: int = 0
    earliest: DifferingRow | None = None
    shown: list[DifferingRow] = field(default_factory=list)
    utility: Utilities | None = None

    @property
    def differing(self) -> int:
        return self.rows - self.identical


def compare_rows(
    first: Iterator[Row], second: Iterator[Row], scorer: Scorer | None, examples: int, by: str = "request_id"
) -> Comparison:
    """Compare two outputs' rows, which have `request_id`, `token_ids` and the scorer's columns; few are in memory.

    Raises `InputError` if the scorer cannot score a row.
    """
    result, utilities = Comparison(), list[tuple[float, float]]()
    pairs = RowPairs(first, second, by)
    for ours, theirs in pairs:
        result.rows += 1
        scores = None
        if scorer is not None:
            scores = (scorer(ours), scorer(theirs))
            utilities.append(scores)
        place = first_difference(ours["token_ids"], theirs["token_ids"])
        if place is None:
            result.identical += 1
            continue
        row = DifferingRow(ours, theirs, place, scores)
        if result.earliest is None or place < result.earliest.place:
            result.earliest = row
        result.shown = nsmallest(
            examples, [*result.shown, row], key=lambda one: (zlib.crc32(one.name.encode()), one.name)
        )
    result.only_first, result.only_second = len(pairs.only_first), len(pairs.only_second)
    result.utility = Utilities.of(utilities) if utilities else None
    return result


def _other_lines(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether rows of one name are lines of files that differ, though equal rows have equal prompts."""
    by_line = all(run.get(NAMED_BY, "unknown") is None for run in (first, second))
    alike = by_line and all(first["meaning"][name] == second["meaning"][name] for name in ("model", "reading"))
    return alike and first["input"] != second["input"]


def compare(config: CompareConfig) -> None:
    """Compare two outputs, and write the page.

    Raises `InputError` if an output, the scorer or the page cannot be used.
    """
    outputs = [open_output(uri) for uri in (config.first, config.second)]
    scorer = None if config.scorer is None else make_scorer(config.scorer, config.target)
    runs = [read_run_of(output) for output in outputs]
    found, why = Comparison(), "rows have the names of their lines, in files that differ"
    if not _other_lines(*runs):
        first, second = (rows_of(output, _COLUMNS if scorer is None else None) for output in outputs)
        found, why = compare_rows(first, second, scorer, config.examples), "the outputs have no row's name in common"
    if not found.rows:
        given = [set(open_rows(output).schema.names) & {PROMPT_IMAGES} for output in outputs]
        some = [None if scorer else (*_COLUMNS, _PROMPT, *images) for images in given]
        first, second = (paired_by_prompt(rows_of(*one)) for one in zip(outputs, some, strict=True))
        found = compare_rows(first, second, scorer, config.examples, by=_PAIR)
        if not found.rows:
            raise InputError(
                f"{config.first} and {config.second} have no row in common, by its name (request_id) or its prompt's "
                "tokens: compare outputs of the same prompts"
            )
        say(f"{why}: rows are paired by their prompts")
    model = model_name(runs[1]["config"]["model"])
    if (tokenizer := local_tokenizer(model)) is None:
        say(f"tokens are shown as numbers: the tokenizer of {model} is not on this machine")
    rows = [(row, row.texts(tokenizer)) for row in found.shown]
    names = without_secrets(config.first), without_secrets(config.second)
    text = render("comparison.html.jinja", names=names, comparison=found, scorer=config.scorer, rows=rows)
    path = write_page(config.page_uri, text)
    print(without_secrets("\n".join([*_summary(found, config), path])), flush=True)


def _summary(found: Comparison, config: CompareConfig) -> list[str]:
    lines = [f"{found.rows:,} rows in both outputs, {found.identical:,} of them with the same tokens"]
    if found.only_first or found.only_second:
        lines.append(f"{found.only_first:,} rows only in {config.first}, {found.only_second:,} only in {config.second}")
    if found.earliest is not None:
        lines.append(f"earliest difference: row {found.earliest.name}, token {found.earliest.place}")
    if (utility := found.utility) is not None:
        margin = "" if utility.margin is None else f" ± {utility.margin:.4f} (95 %, paired)"
        lines.append(
            f"utility by {config.scorer}: {utility.first:.4f} and {utility.second:.4f}, "
            f"difference {utility.difference:+.4f}{margin}"
        )
    return lines
