"""Question files: which are read, and which are refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from drafter.evaluation.questions import Question, QuestionError, read_questions
from tests.support.paths import ROOT


def test_an_input_of_the_generation_job_is_read_as_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "D"}, {"type": "text", "text": "E?"}]}]
    lines = [{"prompt": "Say this.", "question": "Not this."}, {"messages": chat}, {"messages": parts}]
    file.write_text("\ufeff" + "".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    assert [one.turns for one in read_questions(file)] == [("Say this.",), ("A?", "C?"), ("D\nE?",)]


def test_both_formats_are_read(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    chat = {
        "question_id": None,
        "id": 81,
        "category": "writing",
        "turns": ["Say\u2028this.", "Now that."],
        "reference": ["x"],
    }
    file.write_text(json.dumps(chat, ensure_ascii=False) + '\n\n{"question": "How many?", "answer": "3"}\n')
    assert read_questions(file) == [
        Question("81", "writing", ("Say\u2028this.", "Now that.")),
        Question("line 3", "", ("How many?",)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"turns": ["a"]}\n{"turns"', "line 2: not JSON: give a file of JSON lines"),
        (b'{"text": "a"}', "line 1: it must be an object with one of turns, prompt, messages, question"),
        (b"[1]", "line 1: it must be an object"),
        (b'{"turns": []}', "line 1: its turns must hold texts"),
        (b'{"turns": ["a", " "]}', "line 1: its turns must hold texts"),
        (b'{"turns": "a"}', "line 1: its turns must hold texts"),
        (b'{"question": 3}', "line 1: its question must hold texts"),
        (b'{"question": [[{"role": "user"}]]}', "line 1: its question must be a text, or a list of turns"),
        (b'{"prompt": ""}', "line 1: its prompt must hold texts"),
        (rb'{"prompt": "a \ud83d"}', "line 1: it has half a character"),
        (rb'{"prompt": "a", "category": "\ud83d"}', "line 1: it has half a character"),
        (b'{"messages": ["a"]}', "line 1: its messages must be a list of {role, content}"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "line 1: a message of the role 'system'"),
        (b'{"messages": [{"role": "user"}]}', "line 1: its messages must hold texts"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "line 1: its messages must hold texts"),
        (b'{"question": [[], []]}', "line 1: its question must hold texts"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}',
            "line 1: its messages have an image, which is not evaluated",
        ),
        (b'{"turns": ["a"], "category": 3}', "line 1: category must be a text, not 3"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_what_is_not_a_question_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(QuestionError, match=message) as caught:
        read_questions(file)
    assert str(file) in str(caught.value)


def test_a_question_with_functions_has_their_schemas_before_it(tmp_path: Path) -> None:
    """As in BFCL, whose turns are lists of messages."""
    file, add = tmp_path / "questions.jsonl", {"name": "add", "parameters": {"type": "dict"}}
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
    row = {
        "id": "simple_0",
        "question": [[system, user], [], [{"role": "user", "content": "And 3?"}]],
        "function": [add],
    }
    file.write_text(json.dumps(row))
    (question,) = read_questions(file)
    assert (question.name, len(question.turns)) == ("simple_0", 2)
    assert json.dumps([add]) in question.turns[0]
    assert question.turns[0].endswith("\n\nBe brief.\n\n2 + 2?")
    assert question.turns[1] == "And 3?"


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"question": "How many?"}\n'))
    assert [one.turns for one in read_questions(file)] == [("How many?",)]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(QuestionError, match="cannot be read"):
        read_questions(file)


@pytest.mark.parametrize("place", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(QuestionError, match="cannot be read"):
        read_questions(tmp_path / place)


def test_a_limit_keeps_the_share_of_every_category() -> None:
    file = ROOT / "data" / "chat-prompts" / "questions.jsonl"
    assert len(read_questions(file)) == 40
    few = read_questions(file, 16)
    assert len(few) == 16
    assert set(Counter(question.category for question in few).values()) == {2}
    assert len(Counter(question.category for question in few)) == 8
    assert read_questions(file, 100) == read_questions(file)


def test_the_shipped_conversations_have_two_turns() -> None:
    questions = read_questions(ROOT / "data" / "chat-prompts" / "questions.jsonl")
    assert {len(question.turns) for question in questions} == {2}
    assert len({turn for question in questions for turn in question.turns}) == 80
