from __future__ import annotations

import json
import random
from pathlib import Path

from drafter.drafters.registry import load_drafter
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.report.scorers import last_number
from recipes.sums.__main__ import TEST_PROBLEMS, main
from recipes.sums.problems import Problem, problems, words
from recipes.sums.training import Size, build_tokenizer


def test_answers_are_right_in_many_words() -> None:
    problem, rng = Problem((3, 9, 4, 7)), random.Random(0)
    answers = {problem.worked_out(rng) for _ in range(50)}
    assert len(answers) > 20
    assert {last_number(answer) for answer in answers} == {23}
    assert problem.question == "3 + 9 + 4 + 7 ="
    assert {word for answer in answers for word in answer.split()} <= set(words())


def test_sums_that_are_held_out_are_no_others() -> None:
    kept, out = (set(problems(held_out=held_out)) for held_out in (False, True))
    assert not kept & out
    assert len(kept | out) == 9**4
    assert len(out) > TEST_PROBLEMS


def test_a_token_is_a_word_and_comes_back() -> None:
    tokenizer = build_tokenizer()
    text = "12 + 3 = so the answer is 15"
    assert len(tokenizer(text)["input_ids"]) == len(text.split())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_models_go_together(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path)], Size(16, 2, 3), Size(16, 1, 3)) == 0
    base = load_base(str(tmp_path / "base"))
    assert load_drafter(f"model:{tmp_path / 'draft'}", base, 4).spec.max_nodes == 4
    assert load_tokenizer(str(tmp_path / "base")).chat_template is None
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert len(rows) == TEST_PROBLEMS
    assert rows[0].keys() == {"question", "answer"}
