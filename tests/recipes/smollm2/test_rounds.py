"""Rounds of prompts: what goes in, in which order jobs are run, and what is not done again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import InputError, JobError
from pipeline.generate.config import GenerateConfig
from recipes.smollm2 import distil, rounds
from recipes.smollm2.__main__ import main
from recipes.smollm2.rounds import LAST_PROBLEM, PROBLEMS, Round, measured_questions, write_prompts


def read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_questions(one: Round, texts: dict[int, str]) -> None:
    """Write what the model is said to have written, the last opening first, as a job may."""
    rows = [{"number": n, "text": t, "finish_reason": "stop", "num_output_tokens": 9} for n, t in texts.items()]
    (one.questions / "data").mkdir(parents=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows[::-1]), one.questions / "data" / "part.parquet")


def test_a_round_repeats_no_earlier_question_and_none_that_is_measured(tmp_path: Path) -> None:
    first, second = Round(1, tmp_path), Round(2, tmp_path)
    write_questions(first, {0: "What is the capital of France?", 1: "How do I bake a cake for my mother?"})
    write_prompts(first)
    measured = measured_questions()
    write_questions(
        second, {2: "How do I bake a cake for my mother", 3: measured[0], 4: "Who wrote the Iliad to whom?"}
    )
    write_prompts(second)
    rows = [read(one.prompts) for one in (first, second)]
    assert [row["prompt"] for row in rows[0] if row["source"] == "magpie"] == [
        "What is the capital of France?",
        "How do I bake a cake for my mother?",
    ]
    assert [row["prompt"] for row in rows[1] if row["source"] == "magpie"] == ["Who wrote the Iliad to whom?"]


def test_problems_are_of_the_training_split_each_in_one_round(tmp_path: Path) -> None:
    packed = (rounds.DATA / "gsm8k" / "train.jsonl.gz").read_bytes()
    train = [json.loads(line)["question"] for line in gzip.decompress(packed).splitlines()]
    taken = []
    for number in (1, 2, 15):
        write_questions(Round(number, tmp_path), {0: "Is it?"})
        for earlier in range(1, number):
            prompts = Round(earlier, tmp_path).prompts
            prompts.parent.mkdir(exist_ok=True)
            prompts.touch()
        write_prompts(Round(number, tmp_path))
        taken.append([row["prompt"] for row in read(Round(number, tmp_path).prompts) if row["source"] == "gsm8k"])
    assert taken[0] + taken[1] == train[: 2 * PROBLEMS]
    assert taken[2] == train[14 * PROBLEMS : LAST_PROBLEM]
    assert not set(measured_questions()) & set(train)


def test_a_third_of_the_prompts_is_sampled(tmp_path: Path) -> None:
    write_questions(Round(1, tmp_path), {0: "What is it?"})
    write_prompts(Round(1, tmp_path))
    heats = [row["sampling"]["temperature"] for row in read(Round(1, tmp_path).prompts)]
    assert heats[:6] == [0.0, 0.0, 0.7, 0.0, 0.0, 0.7]


class Jobs:
    """Stands for `generate`, and decodes nothing.

    Attributes:
        asked: The jobs that were run.
        failing: What jobs fail to make: `questions` or `answers`.
    """

    def __init__(self) -> None:
        self.asked: list[GenerateConfig] = []
        self.failing = ""

    def __call__(self, config: GenerateConfig) -> None:
        output = Path(config.output)
        if output.name == self.failing:
            raise JobError("the machine is gone")
        self.asked.append(config)
        if output.name == "questions":
            write_questions(Round(int(output.parent.name[-2:]), output.parents[1]), {0: "?"})


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.setattr(distil, "generate", jobs)
    monkeypatch.setattr(distil, "write_openings", lambda one, model: one.openings.parent.mkdir(exist_ok=True))
    return jobs


def test_each_round_asks_and_then_answers(tmp_path: Path, jobs: Jobs) -> None:
    distil.distil(Path("base"), tmp_path, 2, ["--resources.cpus_per_actor", "1"])
    assert [Path(job.input).relative_to(tmp_path).as_posix() for job in jobs.asked] == [
        "round-01/openings.jsonl",
        "round-01/prompts.jsonl",
        "round-02/openings.jsonl",
        "round-02/prompts.jsonl",
    ]
    assert {(job.model, job.resources.cpus_per_actor) for job in jobs.asked} == {("base", 1.0)}
    questions, answers = jobs.asked[:2]
    assert (questions.reading.chat, questions.sampling.temperature) == (False, 1.0)
    assert (answers.reading.chat, answers.sampling.temperature) == (None, None)
    assert Path(answers.output) == Round(1, tmp_path).answers


def test_questions_that_were_chosen_stay_chosen(tmp_path: Path, jobs: Jobs) -> None:
    jobs.failing = "answers"
    with pytest.raises(JobError):
        distil.distil(Path("base"), tmp_path, 1, [])
    jobs.failing = ""
    distil.distil(Path("base"), tmp_path, 1, [])
    assert [Path(job.output).name for job in jobs.asked] == ["questions", "answers"]


def test_an_unknown_setting_is_refused(tmp_path: Path, jobs: Jobs) -> None:
    with pytest.raises(InputError, match="no_such"):
        distil.distil(Path("base"), tmp_path, 1, ["--no_such", "1"])
    assert not jobs.asked


def test_the_model_must_have_been_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distil", "--model", str(tmp_path)]) == 2
    assert "run the stage fetch first" in capsys.readouterr().err
