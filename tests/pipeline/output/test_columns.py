"""Which columns an output has, and what is in them."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest

from drafter.prompt import Prompt, Span
from drafter.requests import Generation, Request, SamplingParams, Timing, TokenLogprob
from drafter.statistics import DecodeCounts, statistics_columns
from drafter.structured_outputs import StructuredOutputs
from pipeline.output.columns import COLUMNS, PROMPT_IMAGES, RunTraits, column_values, columns_type, wanted_columns

PLAIN = RunTraits(SamplingParams(), rows_have_settings=False, drafter="ngram+memory")


MARKS = ("lossless", "verifier", "num_lenient_tokens", "lenient_positions")
"""Columns of a verifier that is not lossless."""
RECORDS = ("valid", "num_forced_tokens", "forced_positions")
"""Columns of structured outputs."""


def names(traits: RunTraits) -> set[str]:
    return {column.name for column in wanted_columns(traits)}


def test_the_columns_are_those_that_outputs_have() -> None:
    columns = columns_type()
    assert [field.name for field in columns] == [
        "text",
        "reasoning_content",
        "prompt_token_ids",
        PROMPT_IMAGES,
        "token_ids",
        "finish_reason",
        "valid",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "seed",
        *statistics_columns(DecodeCounts()),
        "generation_seconds",
        "finished_at",
        "logprobs",
        "forced_positions",
        "drafter",
        "drafter_version",
        *MARKS,
    ]
    assert columns.field("finished_at").type == pa.timestamp("ms", "UTC")
    assert columns.field("acceptance_histogram").type == pa.list_(pa.int64())
    assert columns.field("draft_acceptance_rate").type == pa.float64()


def test_every_value_has_the_type_of_its_column() -> None:
    counts = DecodeCounts()
    counts.record_step(emitted=3, accepted=2, drafted=4)
    logprobs = [TokenLogprob(4, -0.5, ((4, -0.5), (5, -1.5)))]
    generation = Generation("", [4], "text", "stop", 2, counts, logprobs, Timing(queued=1.0, total=3.5))
    generation = dataclasses.replace(
        generation, drafter_versions=[3, 5], forced=[0], valid=True, reasoning_content="hm", num_cached_tokens=1
    )
    prompt = Prompt([1, 2], (Span(0, 1, b"\x01\xff"),))
    values = column_values(generation, Request(prompt, SamplingParams(seed=2**63 - 1)), PLAIN)
    (row,) = pa.array([values], columns_type()).to_pylist()
    assert {name: value for name, value in row.items() if name != "finished_at"} == {
        "text": "text",
        "reasoning_content": "hm",
        "prompt_token_ids": [1, 2],
        PROMPT_IMAGES: [{"start": 0, "stop": 1, "digest": "01ff"}],
        "token_ids": [4],
        "finish_reason": "stop",
        "valid": True,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 1,
        "num_output_tokens": 1,
        "seed": 2**63 - 1,
        **statistics_columns(counts),
        "generation_seconds": 2.5,
        "logprobs": [
            {
                "token_id": 4,
                "logprob": -0.5,
                "top": [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -1.5}],
            }
        ],
        "forced_positions": [0],
        "drafter": "ngram+memory",
        "drafter_version": 5,
        "lossless": True,
        "verifier": "exact",
        "num_lenient_tokens": 0,
        "lenient_positions": [],
    }


@pytest.mark.parametrize(
    ("traits", "optional"),
    [
        (PLAIN, set()),
        (dataclasses.replace(PLAIN, sampling=SamplingParams(logprobs=0)), {"logprobs"}),
        (dataclasses.replace(PLAIN, rows_have_settings=True), {"logprobs", *RECORDS}),
        (
            dataclasses.replace(PLAIN, sampling=SamplingParams(structured_outputs=StructuredOutputs(json_object=True))),
            {*RECORDS},
        ),
        (dataclasses.replace(PLAIN, learning=True), {"drafter_version"}),
        (dataclasses.replace(PLAIN, images=True), {PROMPT_IMAGES}),
        (dataclasses.replace(PLAIN, reasons=True), {"reasoning_content"}),
        (dataclasses.replace(PLAIN, lossless=False), {*MARKS}),
    ],
)
def test_optional_columns_are_there_for_who_asks(traits: RunTraits, optional: set[str]) -> None:
    others = {"logprobs", "drafter_version", "reasoning_content", PROMPT_IMAGES, *MARKS, *RECORDS}
    always = {column.name for column in COLUMNS} - others
    assert names(traits) == always | optional
