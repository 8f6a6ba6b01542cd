"""The planning job on a tiny model: what it prints and writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.plan import main
from pipeline.errors import InputError
from pipeline.evaluation.config import PlanConfig, parse_plan
from tests.pipeline.conftest import write_jsonl


@pytest.mark.slow
def test_the_job_compares_stacks_and_names_the_best(
    local_ray: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions = write_jsonl(tmp_path / "questions.jsonl", [{"question": "how many pens"}, {"question": "apples she"}])
    arguments = ["--model", model, "--input", questions, "--num_draft_tokens", 4]
    arguments += ["--drafters", f'[cacheback, "model:{model}"]', "--max_new_tokens", 8]
    code = main([str(argument) for argument in arguments])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    header, _, *rows = [line.strip("| ").split(" | ") for line in printed.out.splitlines() if line.startswith("|")]
    assert header[:2] == ["drafter", "expected ms a token"]
    names = [row[0].strip("`") for row in rows]
    assert {"none", "cacheback"} <= set(names)
    # Of stacks with the same highest level those are left out that another one dominates, which the times decide.
    assert any(name.endswith(f"model:{model}") for name in names)
    times = [float(row[1]) for row in rows]
    assert times == sorted(times)
    assert f"best:     --drafter '{names[0]}'" in printed.out
    assert main([str(argument) for argument in [*arguments, "--drafters", "[ctc]"]]) == 2
    assert "cannot be planned with" in capfd.readouterr().err


def test_settings_that_cannot_be_used_are_refused() -> None:
    config = parse_plan(["--input", "in", "--drafters", "[ngram, 'model:a']"])
    assert config == PlanConfig("in", ["ngram", "model:a"])
    wrong: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["ngram", "ngram"], {}),
        (["ngram"], {"batch": 0}),
        (["ngram"], {"num_draft_tokens": 0}),
        (["ngram"], {"questions_per_file": 0}),
    ]
    for drafters, change in wrong:
        with pytest.raises(InputError):
            PlanConfig("in", drafters, **change)
    with pytest.raises(InputError, match="temperature"):
        PlanConfig("in", ["ngram"], temperature=-1.0)
