from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InputError
from pipeline.report.scorers import last_number, make_scorer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 5", 5),
        ("3 and 1,234.5.", 1234.5),
        ("-7", -7),
        ("#### 18", 18),
        ("none", None),
        ("a 4. b", 4),
        ("6.02e23", 6.02e23),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("scorer", "text", "target", "worth"),
    [
        ("number", "so 2 + 2 is 4.", "#### 4", 1),
        ("number", "so 2 + 2 is 5.", "#### 4", 0),
        ("number", "no idea", "none", 0),
        ("string", " yes\n", "yes", 1),
        ("string", "Yes", "yes", 0),
        ("json", '{"a": [1, 2], "b": null}', '{"b": null, "a": [1, 2]}', 1),
        ("json", '{"a": 1', '{"a": 1}', 0),
        ("json", '{"a": 1}', {"a": 1}, 1),
        ("json", "[" * 200_000, "[]", 0),
        ("json", "true", "1", 0),
        ("json", '{"a": [0]}', '{"a": [false]}', 0),
        ("json", "[true, null]", "[true, null]", 1),
        ("json", "[1.0, 2]", "[1, 2.0]", 1),
        ("json", "[1, 2]", "[1]", 0),
        ("json", '{"a": 1}', '{"b": 1}', 0),
        ("json", "[]", "{}", 0),
        ("json", "null", "0", 0),
        ("number", "so 2.5", Decimal("2.5"), 1),
        ("number", "so 0.00001", 0.00001, 1),
        ("number", "so -5", 0.00001, 0),
        ("string", '"2026-01-02 00:00:00"', datetime(2026, 1, 2), 1),
    ],
)
def test_built_in_scorers(scorer: str, text: str, target: Any, worth: float) -> None:
    row = {"request_id": "a", "text": text, "answer": target}
    assert make_scorer(scorer, "answer")(row) == worth


def test_a_function_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(
        "def length(row): return len(row['text']) / 10\n"
        "def right(row): return row['text'] == 'yes'\n"
        "def broken(row): return row['nothing']\n"
        "def word(row): return 'good'\n"
        "CONSTANT = 3\n"
    )
    row = {"request_id": "row 7", "text": "yes"}
    assert make_scorer(f"{file}:length", None)(row) == 0.3
    assert make_scorer(f"{file}:right", None)(row) == 1.0
    with pytest.raises(InputError, match="failed on row row 7: KeyError: 'nothing'"):
        make_scorer(f"{file}:broken", None)(row)
    with pytest.raises(InputError, match="must return a finite number, not 'good', row row 7"):
        make_scorer(f"{file}:word", None)(row)
    with pytest.raises(InputError, match="has no function 'CONSTANT'"):
        make_scorer(f"{file}:CONSTANT", None)


def test_a_file_with_a_dataclass_whose_annotations_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Worth:\n"
        "    value: float\n"
        "def score(row): return Worth(0.5).value\n"
    )
    assert make_scorer(f"{file}:score", None)({"request_id": "a", "text": ""}) == 0.5


def test_what_is_no_scorer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nowhere_to_be_found\n")
    for name, message in (
        ("accuracy", "no scorer 'accuracy': use number, string, json, or FILE.py:function"),
        ("number", "the scorer number compares with a column of the rows: name it with --target"),
        (f"{tmp_path}/none.py:f", "none.py is not a Python file"),
        (f"{tmp_path}/bad.py:f", "bad.py cannot be loaded: ModuleNotFoundError"),
    ):
        with pytest.raises(InputError) as caught:
            make_scorer(name, None)
        assert message in str(caught.value)
    with pytest.raises(InputError, match="row a has no column 'answer' to compare with: set --target"):
        make_scorer("string", "answer")({"request_id": "a", "text": "x"})
