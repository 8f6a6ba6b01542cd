"""Rows of parts as the stages of the generation job hand them on."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from drafter.requests import Generation, Request, SamplingParams
from drafter.statistics import DecodeCounts
from pipeline.io.parts import PROBLEM_TYPE, pack, problem_column
from pipeline.output.columns import RunTraits, column_values, columns_type

RUN = RunTraits(SamplingParams(), rows_have_settings=False)
BAD_PROMPT = {"type": "BadPrompt", "message": "empty", "input": None, "attempts": 0}


def request_part(prompts: list[list[int] | None], part: str = "p", tokens: int = 6) -> pa.Table:
    """A part as an engine takes it."""
    count = len(prompts)
    sampling = json.dumps({"max_new_tokens": tokens, "ignore_eos": True})
    rows = pa.table(
        {
            "request_id": pa.array([str(index) for index in range(count)]),
            "row": pa.array([{"prompt": "x"}] * count),
            "problem": pa.nulls(count, PROBLEM_TYPE),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "sampling": pa.array([sampling] * count),
        }
    )
    return pack([(part, rows)])


def made_generation() -> tuple[Generation, Request]:
    """A generation of three steps, and its request."""
    counts = DecodeCounts()
    for accepted in (0, 2, 2):
        counts.record_step(emitted=accepted + 1, accepted=accepted, drafted=4)
    return Generation("", [1] * 7, "text", "stop", 3, counts), Request([1, 2, 3], SamplingParams(seed=5))


def generated_rows(part: str, rows: list[dict[str, Any]], problems: list[Any]) -> pa.Table:
    """Rows of a part as an engine leaves them; each one generated took three steps."""
    generated = [None if problem else column_values(*made_generation(), RUN) for problem in problems]
    return pa.table(
        {
            "request_id": pa.array([f"{part}:{index}" for index in range(len(rows))]),
            "row": pa.array(rows),
            "problem": problem_column(problems),
            "generated": pa.array(generated, columns_type()),
        }
    )
