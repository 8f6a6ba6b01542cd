"""Rows that are programs, on real Ray with a real engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Run, write_jsonl

PROGRAMS = "tests.support.programs"


def rows(count: int, folder: Path) -> list[dict[str, Any]]:
    return [{"prompt": f"how many apples and pens {n}", "n": n, "notes": str(folder)} for n in range(count)]


def test_a_program_of_one_call_has_the_rows_own_tokens(run: Run, tmp_path: Path) -> None:
    """With the row's settings and seeds, greedy and sampled, samples, too."""
    given = [{"prompt": f"how many {n}", "sampling": {"temperature": n % 2}} for n in range(4)]
    source = write_jsonl(tmp_path / "in.jsonl", given)
    settings = ("--sampling.seed", 3, "--reading.samples", 2, "--reading.id_column", "prompt")
    plain = run(source, *settings, output=tmp_path / "plain")
    done = run(source, *settings, "--rollout", f"{PROGRAMS}:ask")
    assert (plain.code, done.code) == (0, 0), done.stderr
    summed = ("request_id", "num_prompt_tokens", "num_output_tokens", "seed", "finish_reason", "num_decode_steps")
    assert [[row["ids"], row["answer"], *(row[name] for name in summed)] for row in done.rows] == [
        [row["token_ids"], row["text"], *(row[name] for name in summed)] for row in plain.rows
    ]
    assert {row["num_calls"] for row in done.rows} == {1}
    assert not {"text", "token_ids", "program_columns"} & done.rows[0].keys()
    assert len({row["seed"] for row in done.rows}) == 8


def test_fates_of_programs_are_their_rows_own(run: Run, tmp_path: Path) -> None:
    why = {
        "blocks": "had not ended after limits.row_seconds, 8",
        "waits": "had not ended after limits.row_seconds, 8",
        "endless": "had not ended after limits.row_seconds, 8",
        "no dict": "returned ['a', 'list'], and not a dict of columns by name",
        "taken": "returned a column 'num_calls', which the row has already: give it another name",
        "input": "returned a column 'prompt', which the row has already",
        "no json": "returned a column 'answer' that JSON cannot hold",
        "valid": "returned 'yes' as valid, which is True, False or None",
        "refused": "failed in line 80: RequestError: temperature must be at least 0, not -1",
        "unknown": "failed in line 82: RequestError: unknown setting heat",
        "exits": "failed in line 84: SystemExit: 3",
    }
    fates = [*why, "mends", *(["fine"] * 12)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "how many", "fate": one} for one in fates])
    done = run(source, "--rollout", f"{PROGRAMS}:mixed_fates", "--limits.row_seconds", 8, "--engine.max_num_seqs", 16)
    assert done.code == 0, done.stderr
    said = {fates[int(one["request_id"].partition(":")[2]) - 1]: one for one in done.errors}
    assert said.keys() == why.keys()
    for fate, message in why.items():
        row = f"row {said[fate]['request_id']}: {PROGRAMS}:mixed_fates"
        assert said[fate]["message"].startswith(row)
        assert message in said[fate]["message"]
        assert said[fate]["error_type"] == ("TimedOut" if "had not ended" in message else "ProgramFailed")
    answers = Counter(row["answer"] for row in done.rows)
    assert len(done.rows) == 13
    assert sorted(answers.values()) == [1, 12]
    assert any(one.startswith("mended: the prompt") for one in answers)
