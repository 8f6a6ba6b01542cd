"""The planning job on a tiny model: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.plan import main
from pipeline.errors import InputError
from pipeline.evaluation.config import PlanConfig, parse_plan
from pipeline.evaluation.plan_job import plan
from tests.pipeline.conftest import write_jsonl


@pytest.mark.slow
def test_the_job_compares_stacks_and_names_the_best(
    local_ray: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions = write_jsonl(tmp_path / "questions.jsonl", [{"question": "how many pens"}, {"question": "apples she"}])
    arguments = ["--output", tmp_path / "out", "--model", model, "--input", questions, "--num_draft_tokens", 4]
    arguments += ["--drafters", f'[cacheback, "model:{model}"]', "--max_new_tokens", 8]
    code = main([str(argument) for argument in arguments])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    found = json.loads((tmp_path / "out" / "stacks.json").read_text())
    stacks = [one["levels"] for one in found["expected"]]
    assert [] in stacks
    assert ["cacheback"] in stacks
    # Of stacks with the same highest level those are left out that another one dominates, which the times decide.
    assert any(levels and levels[-1] == f"model:{model}" for levels in stacks)
    times = [one["per_token"] for one in found["expected"]]
    assert times == sorted(times)
    assert {tuple(one["levels"]) for one in found["taken"]} == {(), tuple(stacks[0])}
    assert 0 < found["measured"]["acceptance"][1][-1] <= 1
    assert f"best:     --drafter '{found['best']}'" in printed.out
    assert "| drafter | expected ms a token |" in printed.out
    assert "drafter plan --output" in found["environment"]["command"]
    assert main([str(argument) for argument in [*arguments, "--drafters", "[ctc]"]]) == 2
    assert "cannot be planned with" in capfd.readouterr().err


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    config = parse_plan(["--input", "in", "--output", "out", "--drafters", "[ngram, 'model:a']"])
    assert config == PlanConfig("in", "out", ["ngram", "model:a"])
    wrong: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["ngram", "ngram"], {}),
        (["ngram"], {"batch": 0}),
        (["ngram"], {"num_draft_tokens": 0}),
        (["ngram"], {"questions_per_file": 1}),
    ]
    for drafters, change in wrong:
        with pytest.raises(InputError):
            PlanConfig("in", "out", drafters, **change)
    one = write_jsonl(tmp_path / "one.jsonl", [{"question": "how many pens"}])
    with pytest.raises(InputError, match="a plan needs at least 2"):
        plan(PlanConfig(str(one), "out", ["ngram"]), "")
    with pytest.raises(InputError, match="temperature"):
        PlanConfig("in", "out", ["ngram"], temperature=-1.0)
