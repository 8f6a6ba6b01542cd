from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from pipeline.engines.model_files import folder_fingerprint
from pipeline.pivots.pivots_config import parse_config
from pipeline.pivots.pivots_job import main
from tests.pipeline.conftest import JobRun, Run, write_jsonl

Pivots = Callable[..., JobRun]


@pytest.fixture
def pivots(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Pivots:
    """Run the job in this process: `pivots("--rollouts", 4)`."""
    prompts = [{"prompt": f"how many apples {n} how many apples {n}"} for n in range(12)]
    source = write_jsonl(tmp_path / "in.jsonl", prompts)
    scorer = tmp_path / "score.py"
    scorer.write_text("def worth(row): return len(set(row['text'])) % 3 == 0\n")

    def job(*settings: object) -> JobRun:
        arguments = ["--input", source, "--output", tmp_path / "out", "--model", model, "--drafter", "ngram"]
        arguments += ["--scorer", f"{scorer}:worth", "--rollouts", 3, "--tokens_per_prompt", 4]
        arguments += ["--sampling.max_new_tokens", 32, "--engine.slots", 8, "--engine.nodes", 3]
        arguments += ["--resources.cpus_per_actor", 1, "--resources.max_actors", 1, "--writing.rows_per_file", 20]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return JobRun(code, printed.out, printed.err, tmp_path / "out")

    return job


def labels_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "labels.parquet").to_pylist()
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_from_prompts_to_a_verifier_and_through_a_kill(pivots: Pivots, run: Run, tmp_path: Path) -> None:
    outcome = pivots()
    assert outcome.code == 0, outcome.stderr
    folder = outcome.folder
    labels = labels_in(folder)
    assert {label["pivot"] for label in labels} == {True, False}
    assert {label["held_out"] for label in labels} == {True, False}
    assert all(label["pivot"] == (label["utility_with"] < 0.9 * label["utility_without"]) for label in labels)
    assert {label["rollouts_with"] for label in labels} <= {1, 3}
    results = json.loads((folder / "pivots.json").read_text())
    assert results["labels"] == len(labels)
    curve = results["curve"]
    assert [one["verifier"] for one in curve] == ["exact"] + ["pad"] * (len(curve) - 1)
    assert curve[0]["lenient_tokens"] == 0 < curve[-1]["lenient_tokens"]
    assert curve[-1]["beta"] > curve[0]["beta"]
    assert f"{len(labels):,} rejected tokens" in outcome.stdout
    assert pivots().stdout == f"{folder / 'pivots.json'} is there: the job has finished\n"

    # As after a kill among the continuations: a part of them and all that comes after are not there.
    parts = sorted((folder / "continuations" / "data").iterdir())
    assert len(parts) > 1
    parts[-1].unlink()
    for name in ("labels.parquet", "pivots.json", "verifier/config.json"):
        (folder / name).unlink()
    outcome = pivots()
    assert outcome.code == 0, outcome.stderr
    assert labels_in(folder) == labels

    # What came of it is a verifier of the generation job, and its output is marked.
    settings = ("--verifier", "pad", "--verifier.sigma", "1.0", "--verifier.classifier", folder / "verifier")
    made = run(tmp_path / "in.jsonl", *settings, output=tmp_path / "lenient")
    assert made.code == 0, made.stderr
    assert {row["verifier"] for row in made.rows} == {"pad"}
    meaning = json.loads((made.folder / "run.json").read_text())["meaning"]
    assert meaning["heads"][str(folder / "verifier")] == folder_fingerprint(folder / "verifier")
    refused = pivots("--rollouts", 4)
    assert refused.code == 2
    assert "belongs to another job (rollouts was 3, is now 4)" in refused.error


def test_bad_settings_are_refused(pivots: Pivots, tmp_path: Path) -> None:
    for settings, message in (
        (["--drafter", "none"], "drafter none drafts nothing that could be rejected"),
        (["--rollouts", "0"], "rollouts must be at least 1, not 0"),
        (["--held_out", "1"], "held_out must be between 0 and 1, not 1"),
        (["--temperature", "0"], "temperature must be more than 0, not 0"),
        (["--output", "s3://bucket/out"], "must be a folder of this machine"),
        (["--scorer", "number"], "the scorer number compares with a column of the rows: name it with --target"),
        (["--scorer", f"{tmp_path}/nothing.py:f"], "nothing.py is not a Python file"),
    ):
        outcome = pivots(*settings)
        assert outcome.code == 2
        assert message in outcome.error


def test_continuations_are_requests_of_the_same_base() -> None:
    arguments = ["--input", "in", "--output", "out", "--scorer", "number", "--target", "answer", "--model", "base"]
    sampling = ["--sampling.temperature", "0.5", "--sampling.stop", "['#']"]
    config = parse_config([*arguments, *sampling, "--reading.prompt_column", "question"])
    job = config.continuations("lines.jsonl", "out/continuations")
    assert (job.input, job.output, job.model, job.reading.format) == (
        "lines.jsonl",
        "out/continuations",
        "base",
        "openai",
    )
    assert job.reading.prompt_column is None
    assert (job.sampling.temperature, job.sampling.stop) == (0, ("#",))
