from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from drafter.embedded import EMBEDDED_BASE
from pipeline.report.page import MarkedText, Step, steps_of, text_pieces


def test_a_step_is_its_accepted_run_and_the_token_after_it() -> None:
    pieces = ["a", "b", "c", "d", "e", "f"]
    assert steps_of(pieces, [2, 0, 1]) == [
        Step(1, 2, (MarkedText("ab"),), "c"),
        Step(2, 0, (), "d"),
        Step(3, 1, (MarkedText("e"),), "f"),
    ]
    # A row that ended inside its last run has no token after it.
    assert steps_of(pieces, [3, 2]) == [Step(1, 3, (MarkedText("abc"),), "d"), Step(2, 2, (MarkedText("ef"),), "")]
    assert steps_of([], []) == []


def test_tokens_that_were_accepted_leniently_stand_apart() -> None:
    (step, _) = steps_of(["a", "b", "c", "d", "e", "f"], [4, 0], [1, 2])
    assert step == Step(1, 4, (MarkedText("a"), MarkedText("bc", marked=True), MarkedText("d")), "e")
    assert step.drafted == "abcd"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED_BASE)


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=60))
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_special_tokens_are_seen_and_numbers_stand_in_for_a_lost_tokenizer(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    ids = [*tokenizer("pens", add_special_tokens=False)["input_ids"], end]
    assert text_pieces(tokenizer, ids)[-1] == tokenizer.eos_token
    assert text_pieces(None, [5, 17]) == ["5 ", "17 "]
