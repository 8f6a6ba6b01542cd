"""Results of an OpenAI batch in OpenAI's format, written at the end from the committed rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from drafter.errors import PromptTooLongError, RequestError
from drafter.requests import Generation, SamplingParams
from drafter.statistics import DecodeCounts
from pipeline.cluster.model_copies import model_name
from pipeline.errors import ProblemType
from pipeline.io.files import Location
from pipeline.io.parts import StagedInput, row_name
from pipeline.openai.answers import TokenText, token_text
from pipeline.openai.batch import answer_line, failure_line, parse_line, refusal_line
from pipeline.openai.errors import OpenAIError, not_finite, to_json
from pipeline.openai.requests import ParsedRequest, refuse_images, refused
from pipeline.output.columns import logprobs_of
from pipeline.output.folder import OutputFolder
from pipeline.output.summary import parquet_dataset, read_batches

_ROWS = 256
# Errors of the request itself, which OpenAI would have answered with status 400.
_REFUSED: tuple[ProblemType, ...] = ("BadRequest", "BadPrompt", "BadSampling", "Refused", "ImageUnavailable")
_CODES = {"BadRow": "invalid_json_line", "TimedOut": "request_timeout", "EngineDied": "server_error"}
"""OpenAI's codes of other errors, by the type in `errors/`."""
Row = dict[str, Any]


def batch_bytes(output: OutputFolder) -> dict[str, int]:
    """Return the sizes of an OpenAI batch's answer files, by name; none for other jobs."""
    return {file.name: file.info.size for file in (output.batch_output, output.batch_errors) if file.exists}


@dataclass(frozen=True)
class BatchRun:
    """The run whose rows are the answers.

    Args:
        made: The columns that it has made of rows; others are the input's, whatever their names.
        sampling: Settings of requests that do not say them.
        model: As in the run's settings.
    """

    made: Collection[str]
    sampling: SamplingParams
    model: str | None
    trust_remote_code: bool = False
    images: int | None = None  # most of a request; None for a model that sees none

    @cached_property
    def tokenizer(self) -> Any:  # only lines with log-probabilities or tools need it
        from drafter.text.tokenizers import load_tokenizer  # torch takes seconds to import

        return load_tokenizer(model_name(self.model), trust_remote_code=self.trust_remote_code)

    def understood(self, request: ParsedRequest) -> ParsedRequest:
        """Return a request in the form of the model's chat template; raises an `OpenAIError`."""
        return request if request.tools is None else request.for_model(self.tokenizer)


def write_batch(output: OutputFolder, staged: StagedInput, run: BatchRun) -> None:
    """Write `batch_output.jsonl`, and `batch_errors.jsonl` if there are errors, each atomically.

    The lines are in the order of the input, and the same whenever they are written.
    """

    @cache
    def text(token: int) -> str:
        return token_text(run.tokenizer, token)

    with ExitStack() as files:
        answers = files.enter_context(output.batch_output.open_whole())
        errors = None
        for line in _lines(output, staged, run, text):
            if line["response"] is not None and line["response"]["status_code"] == 200:
                stream = answers
            else:
                stream = errors = errors or files.enter_context(output.batch_errors.open_whole())
            stream.write(to_json(line).encode() + b"\n")


def _lines(output: OutputFolder, staged: StagedInput, run: BatchRun, text: TokenText) -> Iterator[dict[str, Any]]:
    created = staged.created
    for _, rows in groupby(_committed(output, staged), key=lambda one: row_name(one[0]["request_id"])):
        several = list(rows)
        failed = [row for row, has_failed in several if has_failed]
        if failed:
            yield _error_line(failed[0], created, run)
        else:
            choices = [row for row, _ in several]
            request = run.understood(parse_line(choices[0]))
            generations = [_generation_of(_only(row, run.made), request, lambda: run.tokenizer) for row in choices]
            yield answer_line(request, choices[0]["custom_id"], generations, created, text)


def _only(row: Row, made: Collection[str]) -> Row:
    # What a run has not made must not be taken from an input's column of that name, such as `lossless`.
    return {name: value for name, value in row.items() if name in made or name == "request_id"}


def _committed(output: OutputFolder, staged: StagedInput) -> Iterator[tuple[Row, bool]]:
    # Finished rows and errors together, in the order of the input, and whether they have failed.
    finished, errors = _rows(output.data), _rows(output.errors)
    row, error = next(finished, None), next(errors, None)
    for name in staged.request_ids():
        if row is not None and row["request_id"] == name:
            yield row, False
            row = next(finished, None)
        elif error is not None and error["request_id"] == name:
            yield error, True
            error = next(errors, None)
        else:
            raise RuntimeError(f"row {name} is neither in the output nor among the errors")


def _rows(folder: Location) -> Iterator[Row]:
    for batch in read_batches(parquet_dataset(folder), None, _ROWS):
        yield from batch.to_pylist()


def _marked(row: Row, request: ParsedRequest, tokenizer: Callable[[], Any]) -> str | None:
    """Return a row's text with the marks of calls, of which its tokens know; None where there are no calls."""
    if request.marks is None:
        return None
    from drafter.text.text_stream import read_output  # transformers takes seconds to import

    # The text ends before a stop string; a row does not tell those of its run.
    sampling = replace(request.sampling(SamplingParams()), stop=())
    said = read_output(tokenizer(), row["prompt_token_ids"], row["token_ids"], sampling)
    return request.marks.beginning(said.marked, len(row["text"]), whole=False)


def _generation_of(row: Row, request: ParsedRequest, tokenizer: Callable[[], Any]) -> Generation:
    counts = DecodeCounts(
        num_output_tokens=row["num_output_tokens"],
        num_draft_tokens=row["num_draft_tokens"],
        num_accepted_draft_tokens=row["num_accepted_draft_tokens"],
    )
    return Generation(
        row["request_id"],
        row["token_ids"],
        row["text"],
        row["finish_reason"],
        row["num_prompt_tokens"],
        counts,
        logprobs_of(row["logprobs"]),
        verifier=row.get("verifier", "exact"),
        lossless=row.get("lossless", True),
        lenient=row.get("lenient_positions", []),
        reasoning_content=row.get("reasoning_content"),
        marked=_marked(row, request, tokenizer),
        num_cached_tokens=row.get("num_cached_tokens", 0),
    )


def _error_line(row: Row, created: int, run: BatchRun) -> dict[str, Any]:
    place, kind = row_name(row["request_id"]), row["error_type"]
    try:
        line = json.loads(row["input"])
        custom_id = line["custom_id"]
    except (ValueError, TypeError, KeyError):  # the line is not a record
        line, custom_id = {}, None
    if kind == "BadRow" and not (isinstance(custom_id, str) and custom_id):
        return failure_line(None, place, created, _CODES["BadRow"], f"{place}: {row['message']}")
    if kind == "NotFinite":
        return refusal_line(custom_id, created, not_finite())
    if kind not in _REFUSED:
        return failure_line(custom_id, place, created, _CODES[kind], row["message"])
    return refusal_line(custom_id, created, _refusal(line, row["message"], run))


def _refusal(line: Row, message: str, run: BatchRun) -> OpenAIError:
    """Return the error with which the endpoint answers a request that was refused with a message."""
    too_long = message.endswith(PromptTooLongError.ADVICE)
    why = PromptTooLongError(message) if too_long else RequestError(message)
    request = None
    try:
        request = parse_line(line)
        if not too_long:
            run.understood(request).sampling(run.sampling)
            refuse_images(len(request.images), run.images)
    except OpenAIError as error:
        return error
    except RequestError:  # as it was then
        pass
    return refused(why, request)
