"""Prompts of other kinds: each kind in turn, from a seed, none that heads are measured on."""

from __future__ import annotations

import json
import re
from pathlib import Path

from recipes.smollm2.kinds import functions, passages, prompts
from recipes.smollm2.rounds import DATA

PROBLEMS = ["Tom has two pens.", "Ann buys nine apples.", "How many are left?", "A train leaves."]


def by_kind(count: int = 200, seed: int = 1) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind, prompt in prompts(count, PROBLEMS, seed):
        found.setdefault(kind, []).append(prompt)
    return found


def test_kinds_come_in_turn_and_follow_from_the_seed() -> None:
    found = by_kind()
    assert {kind: len(texts) for kind, texts in found.items()} == dict.fromkeys(
        ("code", "rewriting", "records", "tools"), 50
    )
    assert found == by_kind()
    assert not set(found["tools"]) & set(by_kind(seed=2)["tools"])


def test_a_record_names_its_keys_and_a_call_its_function() -> None:
    found = by_kind()
    for prompt in found["records"]:
        assert len(set(re.findall(r'"(\w+)"', prompt))) >= 4
        assert "{" not in prompt
    for prompt in found["tools"]:
        (schemas,) = re.findall(r"\[\{.*\}\]", prompt)
        for schema in json.loads(schemas):
            assert schema["name"].isidentifier()
            assert set(schema["parameters"]["required"]) <= schema["parameters"]["properties"].keys()
            assert "self" not in schema["parameters"]["properties"]


def test_texts_are_whole_and_of_a_length_that_an_answer_fits_with() -> None:
    assert len(functions()) > 500
    assert all(one.what.endswith(".") and "def " in one.source for one in functions())
    assert len(passages()) > 100
    assert all(250 <= len(one) <= 1_100 for one in passages())
    rewritten = [prompt for prompt in by_kind()["rewriting"] if any(problem in prompt for problem in PROBLEMS)]
    assert len(rewritten) > 10


def test_nothing_that_is_measured_becomes_a_prompt() -> None:
    files = sorted((DATA / "drafter-prompts").glob("*.jsonl"))
    measured = {turn for file in files for turn in turns(file)}
    assert len(measured) > 500
    made = {prompt for texts in by_kind(2_000).values() for prompt in texts}
    assert not measured & made
    # Nor what is asked for in another way: the sentences of the records and functions are others.
    parts = {part for text in measured for part in text.split("\n\n")[1:] if len(part) > 60}
    assert not any(part in prompt for part in parts for prompt in made)


def turns(file: Path) -> list[str]:
    return [turn for line in file.read_text().splitlines() for turn in json.loads(line)["turns"]]
