"""The embedded hybrid, which was trained: it answers, with drafts and beside other rows as `generate` does alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drafter.embedded import EMBEDDED_HYBRID, OTHER_HEADS
from drafter.engine.config import EngineConfig
from drafter.llm import SpeculativeLM
from drafter.text.chat import encode_chat
from tests.support.marks import slow_but
from tests.support.models import generate_reference

QUESTIONS = [
    "Tom has 3 boxes with 12 pens each. How many pens does he have in all?",
    "A book costs $7. How much do 4 books cost?",
    "Anna has 15 apples and eats 6 of them. How many are left?",
]
NEW = 48


HEAD = str(OTHER_HEADS / "hybrid")


@pytest.fixture(params=slow_but([HEAD], [HEAD, "ngram"]), ids=["head", "ngram"])
def lm(request: pytest.FixtureRequest) -> Iterator[SpeculativeLM]:
    config = EngineConfig(max_num_seqs=3, num_draft_tokens=8)
    with SpeculativeLM.from_pretrained(EMBEDDED_HYBRID, drafter=request.param, config=config) as loaded:
        yield loaded


def test_it_works_out_answers_as_generate_does(lm: SpeculativeLM) -> None:
    assert lm.base.cache_bytes.slot > 0
    answers = list(lm.chat(QUESTIONS, max_new_tokens=NEW))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        prompt = encode_chat(lm.tokenizer, [{"role": "user", "content": question}])
        assert answer.token_ids == generate_reference(lm.base.model, prompt, NEW)[: len(answer.token_ids)]
        assert "<<" in answer.text or "####" in answer.text  # the calculator's annotations, or the result's mark
    assert sum(answer.counts.num_accepted_draft_tokens for answer in answers) > 0
