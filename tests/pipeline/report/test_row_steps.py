from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from drafter.embedded import EMBEDDED_BASE
from pipeline.report.page import Mark, MarkedText, Step, record_listing, steps_of, text_pieces


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


def test_marked_tokens_stand_apart() -> None:
    marks: dict[int, Mark] = {1: "lenient", 2: "lenient", 3: "forced", 4: "forced"}
    (step, last) = steps_of(["a", "b", "c", "d", "e", "f"], [4, 0], marks)
    texts = MarkedText("a"), MarkedText("bc", "lenient"), MarkedText("d", "forced")
    assert step == Step(1, 4, texts, "e", "forced")
    assert step.drafted == "abcd"
    assert last == Step(2, 0, (), "f")


@pytest.mark.parametrize(
    ("text", "listing"),
    [
        ('{"a": [1.0, "é"], "b": {}}', '{\n  "a": [\n    1.0,\n    "é"\n  ],\n  "b": {}\n}'),
        ("[]", "[]"),
        ("12", None),
        ("yes", None),
        ("[" * 2000, None),
        (None, None),
    ],
)
def test_a_record_is_listed(text: str | None, listing: str | None) -> None:
    row = {"text": text, "num_forced_tokens": 0, "num_output_tokens": 9}
    assert record_listing({**row, "valid": text is not None}) == listing
    assert record_listing({**row, "valid": False}) is None
    assert record_listing({"text": text, "valid": True}) is None  # a column of the input


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
