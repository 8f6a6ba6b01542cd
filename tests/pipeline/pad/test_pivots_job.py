from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from jobs.pivots import main
from pipeline.engines.models import folder_fingerprint
from pipeline.pad.config import parse_config
from tests.pipeline.conftest import JobRun, Run, write_jsonl
from tests.support.prepared_workers import driver
from tests.support.waiting import wait_until

Pivots = Callable[..., JobRun]


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[object]:
    """The job's command line, but for its output."""
    prompts = [{"prompt": f"how many apples {n} how many apples {n}"} for n in range(12)]
    source = write_jsonl(tmp_path / "in.jsonl", prompts)
    scorer = tmp_path / "score.py"
    scorer.write_text("def worth(row): return len(set(row['text'])) % 3 == 0\n")
    found: list[object] = ["--input", source, "--model", model, "--drafter", "ngram"]
    found += ["--scorer", f"{scorer}:worth", "--rollouts", 3, "--tokens_per_prompt", 4]
    found += ["--sampling.max_new_tokens", 32, "--engine.max_num_seqs", 8, "--engine.num_draft_tokens", 3]
    return [*found, "--resources.cpus_per_actor", 1, "--resources.max_actors", 1, "--writing.rows_per_file", 20]


@pytest.fixture
def pivots(arguments: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Pivots:
    """Run the job in this process: `pivots("--rollouts", 4)`."""

    def job(*settings: object) -> JobRun:
        capfd.readouterr()
        code = main([str(argument) for argument in ["--output", tmp_path / "out", *arguments, *settings]])
        printed = capfd.readouterr()
        return JobRun(code, printed.out, printed.err, tmp_path / "out")

    return job


def labels_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "labels.parquet").to_pylist()
    return rows


def parts_of(folder: Path) -> dict[str, int]:
    """Finished files of continuations, and when each was written."""
    data = folder / "continuations" / "data"
    return {path.name: path.stat().st_mtime_ns for path in data.iterdir()} if data.is_dir() else {}


def killed_in_the_rollouts(arguments: list[object], folder: Path) -> dict[str, int]:
    """Submit the job, kill it when two files of continuations are there, and return the files."""
    with driver("-m", "jobs.pivots", *arguments) as job:
        wait_until(lambda: job.poll() is not None or len(parts_of(folder)) >= 2, "two files of continuations")
        job.kill()
        assert job.wait() == -signal.SIGKILL
    assert not (folder / "labels.parquet").exists()
    return parts_of(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_from_prompts_to_a_verifier_and_through_a_kill(
    pivots: Pivots, arguments: list[object], run: Run, tmp_path: Path
) -> None:
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

    # The job is killed among the continuations and submitted again: the labels are the same.
    whole = parts_of(folder)
    shutil.rmtree(folder / "continuations")
    for name in ("labels.parquet", "pivots.json", "verifier/config.json"):
        (folder / name).unlink()
    before = killed_in_the_rollouts([*arguments, "--output", folder, "--engine.max_num_seqs", 1], folder)
    assert 2 <= len(before) < len(whole)
    outcome = pivots()
    assert outcome.code == 0, outcome.stderr
    assert labels_in(folder) == labels
    assert before.items() <= parts_of(folder).items()  # what was there is not generated again

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
    assert (job.sampling.temperature, job.sampling.stop) == (None, ("#",))  # requests bring it
