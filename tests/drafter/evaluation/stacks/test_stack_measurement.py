"""What is measured for a plan, as far as it is counts."""

from __future__ import annotations

import pytest

from drafter.base.causal_lm import BaseModel
from drafter.base.loading import load_base, load_tokenizer
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.evaluation.prepared_prompts import prompts_of
from drafter.evaluation.questions import Question
from drafter.evaluation.stacks.stack_measurement import StackPlanning, stack_name
from drafter.evaluation.stacks.stack_plan import expected_tokens
from drafter.evaluation.stacks.stack_report import acceptance_table, stack_table

MODEL = f"model:{EMBEDDED_BASE}"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base(EMBEDDED_BASE)


def test_a_drafter_alone_is_expected_to_do_what_it_did(base: BaseModel) -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    questions = [Question("1", "", ("Tom has 3 boxes of 12 pens. How many pens?",))]
    prompts = prompts_of(base, tokenizer, questions, temperature=0.0, max_new_tokens=24, slots=1)
    planning = StackPlanning(base, tokenizer, [MODEL, "ngram"], 6, 1)
    stream = planning.run(prompts)
    said = []
    while True:
        try:
            said.append(next(stream))
        except StopIteration as stop:
            found = stop.value
            break
    assert f"measuring ngram for {MODEL}" in said
    levels = found.measured
    assert levels.names == ["ngram", MODEL]  # a model above those that are cheaper
    by_stack = {one.levels: one for one in found.expected}
    assert {(), ("ngram",), (MODEL,)} <= by_stack.keys()
    assert by_stack[MODEL,].tokens == pytest.approx(expected_tokens(levels.acceptance[1][-1], 6))
    best = found.taken[0]
    assert best.tokens == pytest.approx(by_stack[best.levels].tokens, rel=0.15)
    assert f"| `{stack_name(best.levels)}` |" in stack_table(found)
    assert acceptance_table(found).count("\n") == 3


def test_heads_cannot_be_levels(base: BaseModel) -> None:
    with pytest.raises(LoadError, match="'ctc' cannot be planned with"):
        StackPlanning(base, None, ["ctc"], 4, 1)


def test_a_stacks_name_is_that_of_the_drafter() -> None:
    assert [stack_name(()), stack_name(("a",)), stack_name(("a", "b", "c"))] == ["none", "a", "stack:a>b>c"]
