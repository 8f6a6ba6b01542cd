"""What the host does in a step grows with the rows, and not with their square: by the number of calls that it makes."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from types import FrameType

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import engine_of

TOKENS = 4


def calls_of_steps(base: BaseModel, rows: int, sampling: SamplingParams) -> list[int]:
    """Calls of functions in each step of as many requests as slots, from the one that reads prompts to the last."""
    engine = engine_of(base, PlainDecoding(), max_num_seqs=rows, max_model_len=64)
    for row in range(rows):
        engine.submit(Request([3 + row % 60, 5 + row // 60, 7], replace(sampling, seed=row)))
    counts, called = [], 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    gc.disable()  # others have it call functions of theirs
    try:
        while not engine.idle:
            called, before = 0, sys.getprofile()
            sys.setprofile(note)
            try:
                engine.step()
            finally:
                sys.setprofile(before)
            counts.append(called)
    finally:
        gc.enable()
    return counts


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_host_work_grows_with_the_rows(tiny_base: BaseModel, settings: dict[str, float]) -> None:
    """All rows enter in the first step and leave in the last."""
    sampling = replace(SamplingParams(TOKENS, ignore_eos=True), **settings)  # type: ignore[arg-type]
    few, many, most = (calls_of_steps(tiny_base, rows, sampling) for rows in (16, 48, 144))
    assert len(few) == len(most) == TOKENS
    for step in range(TOKENS):
        # Three times the rows are three times the further work; more than that would be work for pairs of rows.
        assert most[step] - many[step] < 1.1 * 3 * (many[step] - few[step]), step
