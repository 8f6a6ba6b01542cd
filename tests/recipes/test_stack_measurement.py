"""What is measured for a plan, as far as it is counts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.questions import Question, prompts_of, read_questions
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from recipes.stacks import (
    Cost,
    Stack,
    compare_stacks,
    expectation,
    expected_tokens,
    main,
    measure_levels,
    put_above,
    stack_name,
    stack_table,
)
from tests.support.paths import ROOT

MODEL = f"model:{EMBEDDED_BASE}"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base(EMBEDDED_BASE)


def test_a_drafter_alone_is_expected_to_do_what_it_did(base: BaseModel) -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    questions = [Question("1", "", ("Tom has 3 boxes of 12 pens. How many pens?",))]
    prompts = prompts_of(base, tokenizer, questions, temperature=0.0, max_new_tokens=24, slots=1)
    levels, measured = measure_levels(base, tokenizer, ["ngram", MODEL], 6, [one.request for one in prompts], 1)
    found = {one.levels: one for one in measured}
    assert found.keys() == {(), ("ngram",), (MODEL,), ("ngram", MODEL)}
    by_stack = {one.levels: one for one in compare_stacks(levels)}
    assert {(), ("ngram",), (MODEL,)} <= by_stack.keys()
    assert by_stack[MODEL,].tokens == pytest.approx(expected_tokens(levels.acceptance[1][-1], 6))
    for stack in ((), ("ngram",), (MODEL,)):
        assert by_stack[stack].tokens == pytest.approx(found[stack].tokens, rel=0.15)  # of an α below 1
    assert by_stack["ngram",].per_token == pytest.approx(found["ngram",].per_token, rel=0.15)


def test_the_table_has_what_was_expected_beside_what_was_measured() -> None:
    expected = [Cost(("a",), 2.0, 0.016), Cost(("b", "c"), 2.0, 0.018), Cost((), 1, 0.01)]
    assert stack_table(expected, [Cost(("a",), 1.8, 0.018), Cost((), 1.0, 0.01)]).splitlines()[2:] == [
        "| `a` | 8.00 | 2.00 | 10.00 | 1.80 |",
        "| `stack:b>c` | 9.00 | 2.00 |  |  |",
        "| `none` | 10.00 | 1.00 | 10.00 | 1.00 |",
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
    levels, _ = measure_levels(base, tokenizer, names, 8, [prompt.request for prompt in prompts], 2)
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
        measure_levels(base, None, ["ctc"], 4, [], 1)


def test_a_stacks_name_is_that_of_the_drafter() -> None:
    assert [stack_name(()), stack_name(("a",)), stack_name(("a", "b", "c"))] == ["none", "a", "stack:a>b>c"]


@pytest.mark.slow
def test_the_command_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sample.jsonl").write_text('{"prompt": "Tom has 3 boxes of 12 pens."}\n')
    settings = ["--input", str(tmp_path / "sample.jsonl"), "--max-new-tokens", "8"]
    assert main(["ngram", *settings]) == 0
    assert "best:     --drafter '" in capsys.readouterr().out
    assert main(["ctc", *settings]) == 1
    assert "error: drafter 'ctc' cannot be planned with" in capsys.readouterr().err
