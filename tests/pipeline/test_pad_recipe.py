"""The recipe of the verifier pad, from answers to a classifier: here, as it needs the Ray of the pipeline's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from drafter.methods.pad.method import load_classifier
from pipeline.engines.models import folder_fingerprint
from recipes.pad.__main__ import main
from tests.pipeline.conftest import FinishedJob, JobRun, Run, write_jsonl

Pivots = Callable[..., JobRun]


@pytest.fixture
def pivots(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Pivots:
    """Run the job in this process: `pivots(answers, "--rollouts", 4)`."""
    scorer = tmp_path / "score.py"
    scorer.write_text("def worth(row): return len(set(row['text'])) % 3 == 0\n")

    def job(answers: Path, *settings: object) -> JobRun:
        arguments = ["--input", answers, "--output", tmp_path / "out", "--scorer", f"{scorer}:worth"]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return JobRun(code, printed.out, printed.err, tmp_path / "out")

    return job


def labels_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "labels.parquet").to_pylist()
    return sorted(rows, key=lambda row: (row["request_id"], row["place"]))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_from_answers_to_a_verifier(pivots: Pivots, run: Run, tmp_path: Path) -> None:
    prompts = [{"prompt": f"how many apples {n} how many apples {n}"} for n in range(12)]
    source, sizes = write_jsonl(tmp_path / "in.jsonl", prompts), ("--engine.max_num_seqs", 8)
    answers = run(
        source, "--sampling.max_new_tokens", 32, *sizes, "--engine.num_draft_tokens", 3, output=tmp_path / "answers"
    )
    assert answers.code == 0, answers.stderr
    settings = ("--rollouts", 3, "--tokens_per_prompt", 4, "--cpus", 1)
    outcome = pivots(answers.folder, *settings)
    assert outcome.code == 0, outcome.stderr
    folder = outcome.folder
    labels = labels_in(folder)
    assert {label["pivot"] for label in labels} == {True, False}
    assert {label["held_out"] for label in labels} == {True, False}
    assert all(label["pivot"] == (label["utility_with"] < 0.9 * label["utility_without"]) for label in labels)
    assert {label["rollouts_with"] for label in labels} <= {1, 3}
    assert f"{len(labels):,} rejected tokens" in outcome.stdout
    training = json.loads((folder / "verifier" / "config.json").read_text())["training"]
    assert training["labels"] == len(labels)
    assert training["command"].startswith("python -m recipes.pad --input")

    # The same answers give the same labels.
    assert pivots(answers.folder, *settings).code == 0
    assert labels_in(folder) == labels

    # What came of it is a verifier of the generation job, and its output is marked, which pivots refuses.
    load_classifier(folder / "verifier")
    lenient = ("--verifier", "pad", "--verifier.sigma", "1.0", "--verifier.classifier", folder / "verifier")
    made = run(source, *lenient, output=tmp_path / "lenient")
    assert made.code == 0, made.stderr
    assert {row["verifier"] for row in made.rows} == {"pad"}
    meaning = json.loads((made.folder / "run.json").read_text())["meaning"]
    assert meaning["heads"][str(folder / "verifier")] == folder_fingerprint(folder / "verifier")
    refused = pivots(made.folder)
    assert refused.code == 2
    assert "was made by the verifier pad, which is not exact" in refused.error


def test_bad_settings_are_refused(pivots: Pivots, finished: FinishedJob, tmp_path: Path) -> None:
    answers = finished.outcome.folder
    for settings, message in (
        (["--drafter", "none"], "drafter none drafts nothing that could be rejected"),
        (["--rollouts", "0"], "rollouts must be at least 1, not 0"),
        (["--held_out", "1"], "held_out must be between 0 and 1, not 1"),
        (["--temperature", "0"], "temperature must be more than 0, not 0"),
        (["--scorer", "number"], "the scorer number compares with a column of the rows: name it with --target"),
        (["--scorer", f"{tmp_path}/nothing.py:f"], "nothing.py is not a Python file"),
        (["--input", str(tmp_path)], "is not the output of a generation job"),
    ):
        outcome = pivots(answers, *settings)
        assert outcome.code == 2
        assert message in outcome.error
    (tmp_path / "penalty.py").write_text("def worth(row): return -1.0\n")
    outcome = pivots(answers, "--scorer", f"{tmp_path / 'penalty.py'}:worth")
    assert outcome.code == 2
    assert "pivots are told by shares of what answers are worth" in outcome.error
