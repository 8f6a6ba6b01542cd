from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter.verifiers.verifier_settings import VerifierSettings
from pipeline.errors import InputError
from pipeline.evaluation.evaluate_config import EvaluateConfig, named_verifier, parse_config
from pipeline.evaluation.evaluate_job import main
from tests.pipeline.conftest import JobRun, write_jsonl

Evaluate = Callable[..., JobRun]


@pytest.fixture
def evaluate(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the job in this process: `evaluate("--keep", 0.5)`."""
    rows = [{"question": f"how many apples {n} how many apples {n}", "answer": f"#### {n}"} for n in range(5)]
    questions = write_jsonl(tmp_path / "questions.jsonl", rows)
    scorer = tmp_path / "score.py"
    scorer.write_text("def worth(row): return 1 + (len(row['token_ids']) + int(row['answer'][5:])) % 2\n")

    def job(*settings: object) -> JobRun:
        arguments = ["--output", tmp_path / "out", "--model", model, "--questions", f"{{tiny: {questions}}}"]
        arguments += ["--drafters", "ngram", "--batches", 4, "--nodes", 8, "--max_new_tokens", 40]
        arguments += ["--scorer", f"{scorer}:worth", "--verifiers", "[typical, 'fly:window=1,theta=0']"]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return JobRun(code, printed.out, printed.err, tmp_path / "out")

    return job


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_verifiers_are_measured_and_the_fastest_that_keeps_enough_is_named(evaluate: Evaluate) -> None:
    outcome = evaluate("--temperatures", "[0.0, 0.9]", "--keep", 0.5)
    assert outcome.code == 0, outcome.stderr
    results = json.loads((outcome.folder / "verifiers.json").read_text())
    greedy, drawn = results["blocks"]
    assert [one["verifier"] for one in greedy["verifiers"]] == ["exact"] + 6 * ["typical"] + ["fly"]
    assert [one["verifier"] for one in drawn["verifiers"]] == ["exact"] + 6 * ["typical"]
    assert "the verifier fly decodes greedily" in drawn["left_out"][0]
    exact, *typical, fly = greedy["verifiers"]
    assert all(one["lenient_tokens"] == 0 and one["kept"] == 1 for one in [exact, *typical])  # greedy rows are exact
    assert fly["lenient_tokens"] > 0
    assert fly["beta"] > exact["beta"] > 1
    lenient = [one["lenient_tokens"] for one in drawn["verifiers"]]
    assert lenient[0] == 0 < lenient[-1]
    best = max(
        (one for one in greedy["verifiers"] if one["verifier"] == "fly" and one["kept"] >= 0.5),
        key=lambda one: one["beta"],
    )
    assert best in greedy["kept"]
    assert "keeps 50.0%: --verifier fly --verifier.theta 0.0 --verifier.window 1" in outcome.stdout
    assert results["environment"]["command"].startswith("python -m jobs.evaluate")
    again = evaluate("--temperatures", "[0.0, 0.9]", "--keep", 0.5)
    assert again.code == 0
    assert "temperature 0.9: measured before" in again.stderr
    assert json.loads((outcome.folder / "verifiers.json").read_text()) == results
    assert evaluate("--keep", 0.6).code == 2


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fly", VerifierSettings("fly")),
        ("fly:theta=0.5,window=3", VerifierSettings("fly", theta=0.5, window=3)),
        ("pad:classifier=/a/b,sigma=1", VerifierSettings("pad", classifier="/a/b", sigma=1.0)),
    ],
)
def test_a_verifier_by_name(text: str, settings: VerifierSettings) -> None:
    assert named_verifier(text) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "no lenient verifier 'exact': there are fly, pad, typical"),
        ("fly:depth=3", "there is no setting 'depth'"),
        ("fly:theta=low", "theta must be a number, not 'low'"),
    ],
)
def test_what_is_no_verifier_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EvaluateConfig("out", verifiers=text, scorer="json")


def test_bad_settings_of_verifiers(tmp_path: Path) -> None:
    for arguments, message in (
        (["--keep", "0.9"], "scorer and keep are of verifiers: name some"),
        (["--verifiers", "fly"], "verifiers are measured by what answers are worth: name a scorer"),
        (["--verifiers", "fly", "--scorer", "json", "--keep", "1.5"], "keep must be more than 0 and at most 1"),
    ):
        with pytest.raises(InputError, match=message):
            parse_config(["--output", str(tmp_path), *arguments])
