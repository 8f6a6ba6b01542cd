"""The report job: reads an output and writes one HTML page without scripts and network access."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from drafter.errors import LoadError, RequestError, one_line, without_secrets
from drafter.images.opening import open_image
from drafter.statistics import (
    DecodeCounts,
    acceptance_by_depth,
    draft_acceptance_rate,
    mean_acceptance_length,
    speculated_share,
    total,
)
from drafter.text.detokenizer import Detokenizer
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.model_copies import model_name
from pipeline.errors import InputError
from pipeline.generate.output_images import images_of_output, reading_of_output
from pipeline.generate.row_images import ImageReading
from pipeline.io.files import locate
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import NAMED_BY, OutputFolder, read_status
from pipeline.output.result import Cost, cost_of, times_as_fast
from pipeline.output.summary import RECORDS, time_span
from pipeline.report.config import CATEGORY, ReportConfig
from pipeline.report.outputs import (
    TOKENS,
    Category,
    Row,
    RowSummary,
    open_output,
    open_rows,
    read_errors,
    read_full,
    read_rows,
    read_run_of,
    readable,
)

_COMPARED_ROWS = 100  # rows drawn from both outputs for the comparison token by token
_COMPARED = ("model", "loading", "sampling", "reading")  # keys of `meaning` in `run.json` that are compared
_SLOWEST = 10
_ERRORS_EACH = 5
_MOST_GROUPS = 24
_LONGEST_TEXT = 2000
_SIDE = 480  # most pixels of a side of a picture in the page
_LOSSLESS = 128  # pixels of a side up to which a picture is a PNG; larger ones are JPEG


def report(config: ReportConfig) -> None:
    """Read the output and write the page. Raises `InputError` if one of the outputs or the page cannot be used."""
    output = open_output(config.output)
    run = read_run_of(output)
    dataset = open_rows(output, programs=True)
    column = config.category or (CATEGORY if CATEGORY in dataset.schema.names else None)
    # A row's name begins with its file only where no column names the rows, as far as the output says so.
    by_file = column is None and run.get(NAMED_BY, "unknown") is None
    number = max(config.examples, _COMPARED_ROWS if config.against is not None else 0)
    if TOKENS not in dataset.schema.names:
        number = 0  # a program's row has several texts, none of which can be shown step by step
    with readable(output):
        rows = read_rows(dataset, column, by_file, _SLOWEST, number)
        errors, drawn = read_errors(output, _ERRORS_EACH), read_full(output, rows)
    status = read_status(output.status_file)
    cost = cost_of(status.get("submissions", ()), rows.rows + errors.rows, rows.counts.num_output_tokens)
    other = None if config.against is None else _other_output(config.against, run, rows, drawn, cost)
    examples, not_shown = make_examples(drawn[: config.examples], model_name(run["config"]["model"]))
    pictures = pictures_of(output, run, drawn[: config.examples])
    examples = [replace(one, pictures=pictures.get(one.row["request_id"], ())) for one in examples]
    text = render(
        "page.html.jinja",
        name=without_secrets(config.output),
        run=run,
        status=status,
        rows=rows,
        errors=errors,
        cost=cost,
        other=other,
        category=column or "source file",
        groups=_groups(rows),
        examples=examples,
        not_shown=not_shown,
        acceptance=acceptance_tables(rows.counts),
        learning=status.get("learning") or run.get("learning"),
        speculation=status.get("speculation") or run.get("speculation"),
    )
    print(write_page(config.page_uri, text), flush=True)


def render(template: str, **values: Any) -> str:
    """Render a page. Texts from the rows are escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "acceptance_length": mean_acceptance_length,
        "acceptance": draft_acceptance_rate,
        "speculated": speculated_share,
        "count": "{:,}".format,
        "cut": _cut,
        "decimals": lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
        "lines_shown": lambda text: text.replace("\n", "↵\n").removesuffix("\n"),  # the template breaks the last line
        "span": time_span,
    }
    return environment.get_template(template).render(values)


def _cut(text: str) -> str:
    left = len(text) - _LONGEST_TEXT
    return text if left <= 0 else f"{text[:_LONGEST_TEXT]}… ({left:,} more characters)"


def write_page(uri: str, text: str) -> str:
    """Write a page to a file or URI, and return its path. Raises `InputError` if it cannot be written."""
    page = locate(uri)
    try:
        page.write_text(text)
    except OSError as error:
        raise InputError(f"page {uri} cannot be written: {one_line(error)}") from error
    return page.path


def _groups(rows: RowSummary) -> list[tuple[str, Category]]:
    ordered = sorted(rows.groups.items(), key=lambda one: (-one[1].rows, one[0]))
    shown, rest = ordered[:_MOST_GROUPS], [group for _, group in ordered[_MOST_GROUPS:]]
    if rest:
        others = Category(sum(group.rows for group in rest), total(group.counts for group in rest))
        shown.append((f"{len(rest):,} others", others))
    return shown


@dataclass(frozen=True)
class AcceptanceTable:
    """Shares of the decode steps, from 0 to 1, by what `column` says."""

    title: str
    column: str
    shares: Sequence[tuple[str, float]]


def acceptance_tables(counts: DecodeCounts) -> list[AcceptanceTable]:
    if not counts.num_draft_tokens:
        return []
    steps = sum(counts.acceptance_histogram)
    exactly = [(str(accepted), number / steps) for accepted, number in enumerate(counts.acceptance_histogram)]
    depths = [(str(depth), share) for depth, share in enumerate(acceptance_by_depth(counts), start=1)]
    tables = [AcceptanceTable("Share of steps that accepted so many draft tokens", "draft tokens accepted", exactly)]
    if depths:
        tables.append(AcceptanceTable("By depth: share of steps that accepted at least so many", "depth", depths))
    return tables


# Another output beside this one.


def _other_output(
    uri: str, run: Mapping[str, Any], rows: RowSummary, drawn: Sequence[Row], cost: Cost | str
) -> dict[str, Any]:
    """Compare an output with another one, token by token on the drawn rows that both have.

    `differences` are sentences on others, because of which drafting alone does not explain the costs.
    """
    output = open_output(uri)
    other_run = read_run_of(output)
    dataset = open_rows(output, programs=True)
    with readable(output):
        other_rows = read_rows(dataset, None, False, 0, _COMPARED_ROWS if TOKENS in dataset.schema.names else 0)
        tokens = {row["request_id"]: row["token_ids"] for row in read_full(output, other_rows)}
        found = other_rows.rows + read_errors(output, 0).rows
    both = [row for row in drawn if row["request_id"] in tokens]
    submissions = read_status(output.status_file).get("submissions", ())
    other_cost = cost_of(submissions, found, other_rows.counts.num_output_tokens)
    return {
        "name": without_secrets(uri),
        "rows": other_rows,
        "cost": other_cost,
        "times_as_fast": times_as_fast(cost, other_cost),
        "same_tokens": sum(row["token_ids"] == tokens[row["request_id"]] for row in both),
        "compared": len(both),
        "differences": _differences(run, rows, other_run, other_rows),
    }


def _differences(
    run: Mapping[str, Any], rows: RowSummary, other_run: Mapping[str, Any], other_rows: RowSummary
) -> list[str]:
    found = []
    if other_rows.counts.num_spec_steps:
        found.append(f"The other output is not plain decoding: its drafter was {other_run['config']['drafter']}")
    if rows.rows != other_rows.rows:
        found.append(f"Not the same in both: the rows, {rows.rows:,} and {other_rows.rows:,}")
    same = {name: run["meaning"].get(name) == other_run["meaning"].get(name) for name in _COMPARED}
    same["input"] = run.get("input") == other_run.get("input")
    return found + [f"Not the same in both: the {name}" for name, is_same in same.items() if not is_same]


# Rows shown step by step.

_STEPS = "per_step_accepted"


Mark = Literal["", "forced", "lenient", "differs"]
"""Of tokens: `structured_outputs` left no choice, the target model would have chosen others, the other output has."""


@dataclass(frozen=True)
class MarkedText:
    """Text of consecutive tokens of one mark."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class Step:
    """A decode step of a row: its draft tokens, and the target model's own token, empty where the row ended before."""

    number: int
    accepted: int
    runs: tuple[MarkedText, ...]
    own: str
    own_mark: Mark = ""

    @property
    def drafted(self) -> str:
        return "".join(run.text for run in self.runs)


@dataclass(frozen=True)
class Example:
    """A row with all its columns, its prompt as text, its decode steps, and its record, if it is one, as a listing."""

    row: Mapping[str, Any]
    prompt: str
    steps: Sequence[Step]
    record: str | None = None
    pictures: Sequence[str] = ()  # of the prompt: `data:` URIs, or texts that say why there is none


def make_examples(rows: Sequence[Row], model: str) -> tuple[list[Example], list[str]]:
    """Return rows with their steps, and sentences on what cannot be shown."""
    tokenizer, missing = local_tokenizer(model), []
    if tokenizer is None:
        missing.append(f"Tokens are shown as numbers: the tokenizer of {model} is not on this machine")
    if any(_STEPS not in row for row in rows):
        missing.append(f"The steps cannot be shown: the output has no column {_STEPS}")
    examples = []
    for row in rows:
        prompt = _prompt_text(row, tokenizer)
        pieces = text_pieces(tokenizer, row["token_ids"])
        marks: dict[int, Mark] = dict.fromkeys(row.get("forced_positions") or (), "forced")
        marks |= dict.fromkeys(row.get("lenient_positions") or (), "lenient")
        steps = steps_of(pieces, row.get(_STEPS, [0] * len(pieces)), marks)
        examples.append(Example(row, prompt, steps, record_listing(row)))
    return examples, missing


def _prompt_text(row: Row, tokenizer: Any) -> str:
    """Return a row's prompt, with `[image]` for the tokens of each image."""
    text, start, ids = "", 0, row["prompt_token_ids"]
    for span in [*(row.get(PROMPT_IMAGES) or ()), {"start": len(ids), "stop": len(ids)}]:
        some = ids[start : span["start"]]
        text += " ".join(map(str, some)) if tokenizer is None else tokenizer.decode(some)
        text += "[image]" if span["stop"] > span["start"] else ""
        start = span["stop"]
    return text


def record_listing(row: Row) -> str | None:
    """Return the object or list that is a row's valid record as indented JSON; None where there is none."""
    if not set(RECORDS) <= row.keys() or not row["valid"]:
        return None
    try:
        record = json.loads(row["text"])
    except (ValueError, RecursionError):  # a text by a regular expression or a grammar
        return None
    return json.dumps(record, ensure_ascii=False, indent=2) if isinstance(record, dict | list) else None


def local_tokenizer(model: str) -> Any:
    """Return a model's tokenizer; None if it is not on this machine, since nothing is downloaded."""
    try:
        return load_tokenizer(model, local_files_only=True)
    except LoadError:
        return None


def text_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text, or the ids where `tokenizer` is None.

    A character of several tokens belongs to the last of them. Special tokens show their names.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    special = set(tokenizer.all_special_ids)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in token_ids]
    pieces[-1:] = [piece + detokenizer.tail for piece in pieces[-1:]]
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return [
        str(name) if token in special else piece for token, piece, name in zip(token_ids, pieces, names, strict=True)
    ]


def steps_of(
    pieces: Sequence[str], per_step_accepted: Sequence[int], marks: Mapping[int, Mark] = MappingProxyType({})
) -> list[Step]:
    """Split a row's tokens into decode steps, each of so many accepted draft tokens and one token more.

    `marks` are those of some tokens, by their indices.
    """
    steps, start = [], 0
    for number, accepted in enumerate(per_step_accepted, start=1):
        own = start + accepted
        groups = itertools.groupby(range(start, min(own, len(pieces))), lambda place: marks.get(place, ""))
        runs = tuple(MarkedText("".join(pieces[place] for place in places), mark) for mark, places in groups)
        steps.append(Step(number, accepted, runs, "".join(pieces[own : own + 1]), marks.get(own, "")))
        start = own + 1
    return steps


# Images of rows, as small pictures.


def pictures_of(output: OutputFolder, run: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the images of rows, by their names, as `data:` URIs, or as texts that say why there is none.

    Nothing is fetched from the web.
    """
    seen = [row for row in rows if row.get(PROMPT_IMAGES)]
    if not seen:
        return {}
    sources = images_of_output(output, run).sources([row["request_id"] for row in seen])
    reading = replace(reading_of_output(run), hosts=())
    found = {}
    for row in seen:
        name, count = row["request_id"], len(row[PROMPT_IMAGES])
        pictures = [_picture(one, reading) for one in sources.get(name, ())]
        found[name] = pictures or ["not shown: the staged input is gone"] * count
    return found


def _picture(source: Any, reading: ImageReading) -> str:
    try:
        image = open_image(source, reading.limits, fetch=reading.fetch)
    except RequestError as error:
        return f"not shown: {one_line(error)}"
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream, kind = BytesIO(), "png" if max(image.size) <= _LOSSLESS else "jpeg"
    image.save(stream, kind)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
