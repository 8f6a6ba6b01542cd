"""What is measured for a plan, as far as it is counts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.questions import Prompt, Question, prompts_of, read_questions
from drafter.methods.draft_models.planning import (
    Comparison,
    Cost,
    Levels,
    Stack,
    StackPlanning,
    acceptance_table,
    expectation,
    expected_tokens,
    put_above,
    stack_name,
    stack_table,
)
from drafter.requests import Request
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from tests.support.paths import ROOT

MODEL = f"model:{EMBEDDED_BASE}"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base(EMBEDDED_BASE)


def planned(planning: StackPlanning, prompts: list[Prompt], held_out: list[Prompt]) -> tuple[Comparison, list[str]]:
    """What comes of a plan, and what was said meanwhile."""
    stream = planning.run(prompts, held_out)
    said: list[str] = []
    while True:
        try:
            said.append(next(stream))
        except StopIteration as stop:
            return stop.value, said


def test_a_drafter_alone_is_expected_to_do_what_it_did(base: BaseModel) -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    questions = [Question("1", "", ("Tom has 3 boxes of 12 pens. How many pens?",))]
    prompts = prompts_of(base, tokenizer, questions, temperature=0.0, max_new_tokens=24, slots=1)
    found, said = planned(StackPlanning(base, tokenizer, [MODEL, "ngram"], 6, 1), prompts, prompts)
    assert f"measuring stack:ngram>{MODEL}" in said
    levels = found.measured
    assert levels.names == ["ngram", MODEL]  # a model above those that are cheaper
    by_stack = {one.levels: one for one in found.expected}
    assert {(), ("ngram",), (MODEL,)} <= by_stack.keys()
    assert by_stack[MODEL,].tokens == pytest.approx(expected_tokens(levels.acceptance[1][-1], 6))
    best = found.taken[0]
    assert best.tokens == pytest.approx(by_stack[best.levels].tokens, rel=0.15)
    assert f"| `{stack_name(best.levels)}` |" in stack_table(found)
    assert acceptance_table(found).count("\n") == 3


def test_what_is_taken_is_measured_on_prompts_that_the_plan_has_not_seen(base: BaseModel) -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    texts = ("Tom has 3 boxes of 12 pens. How many pens?", "Ann eats 2 of 9 apples. How many are left?")
    seen, others = (
        prompts_of(base, tokenizer, [Question("1", "", (text,))], temperature=0.0, max_new_tokens=length, slots=1)
        for text, length in zip(texts, (8, 20), strict=True)
    )
    planning, decoded = StackPlanning(base, tokenizer, ["ngram"], 4, 1), []
    decode = planning._decode

    def watched(levels: Sequence[str], requests: Sequence[Request]) -> Any:
        decoded.append(list(requests))
        return decode(levels, requests)

    planning._decode = watched  # type: ignore[method-assign]
    found, said = planned(planning, seen, others)
    first = next(place for place, line in enumerate(said) if line.startswith("taking the time of"))
    assert decoded[:first] == [[seen[0].request]] * first
    assert decoded[first:] == [[others[0].request]] * len(found.taken)


def test_the_table_says_how_far_the_truth_is_from_what_was_expected() -> None:
    expected = [
        Cost(("a",), 2.0, 0.016, 0.008),
        Cost(("b",), 2.0, 0.018, 0.009),
        Cost((), 1, 0.01, 0.01),
    ]
    found = Comparison(
        Levels(["a"], [4.0], [0.1], [[0.0, 0.5]], [[math.inf, 1.0]], 0.9),
        expected,
        [Cost(("a",), 1.8, 0.018, 0.010), Cost((), 1.0, 0.0095, 0.0095)],
    )
    assert stack_table(found).splitlines()[2:] == [
        "| `a` | 8.00 | 2.00 | 16.00 | 10.00 | +25% | 1.80 |",
        "| `b` | 9.00 | 2.00 | 18.00 |  |  |  |",
        "| `none` | 10.00 | 1.00 | 10.00 | 9.50 | -5% | 1.00 |",
    ]


@pytest.mark.slow
def test_a_stack_of_three_is_expected_to_do_about_what_it_does(base: BaseModel, tmp_path: Path) -> None:
    """A draft model of the base's first five layers, and above it the base itself; only pairs have been measured."""
    shutil.copytree(EMBEDDED_BASE, tmp_path / "five")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    model.model.layers = model.model.layers[:5]
    model.config.num_hidden_layers = 5
    model.save_pretrained(tmp_path / "five")
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    questions = read_questions(ROOT / "data" / "gsm8k" / "test.jsonl", 4)
    prompts = prompts_of(base, tokenizer, questions, temperature=0.0, max_new_tokens=40, slots=2)
    names = ["cacheback", f"model:{tmp_path / 'five'}", MODEL]
    found = planned(StackPlanning(base, tokenizer, names, 8, 2), prompts, prompts)[0]
    levels = found.measured
    assert levels.names == names
    lowest = Stack((0,), levels.drafting[0], levels.blocks[0])
    stack = put_above(levels, put_above(levels, lowest, 1), 2)
    drafter = load_drafter("stack:" + ">".join(names), base, 8, isolated=True)
    engine = Engine(base, drafter, tokenizer, EngineConfig(2, num_draft_tokens=8))
    decode_all(engine, [prompt.request for prompt in prompts])
    state = engine.state()
    tokens = state.output_tokens / state.row_steps
    assert tokens > 1.5
    assert expectation(levels, stack).tokens == pytest.approx(tokens, rel=0.15)


def test_heads_cannot_be_levels(base: BaseModel) -> None:
    with pytest.raises(LoadError, match="'ctc' cannot be planned with"):
        StackPlanning(base, None, ["ctc"], 4, 1)


def test_a_stacks_name_is_that_of_the_drafter() -> None:
    assert [stack_name(()), stack_name(("a",)), stack_name(("a", "b", "c"))] == ["none", "a", "stack:a>b>c"]
