"""The evaluation job on a tiny model: what it writes, that it resumes, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from drafter.evaluation.results import Results, figures
from jobs.evaluate import main
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig, parse_config
from tests.pipeline.conftest import Outcome, write_jsonl
from tests.support.paths import ROOT

Evaluate = Callable[..., Outcome]


@pytest.fixture
def evaluate(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the job in this process: `evaluate("--num_draft_tokens", 4)`."""
    questions = write_jsonl(
        tmp_path / "questions.jsonl",
        [{"question_id": 1, "category": "math", "turns": ["how many", "and pens"]}, {"question": "apples she"}],
    )

    def job(*settings: object) -> Outcome:
        arguments = ["--output", tmp_path / "out", "--model", model, "--input", f"{{tiny: {questions}}}"]
        arguments += ["--batch", "[1,2]", "--num_draft_tokens", "4", "--max_new_tokens", "6"]
        arguments += ["--drafter", "ngram", "--tree", "[exact, static]"]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return Outcome(code, printed.out, printed.err, tmp_path / "out")

    return job


def test_the_job_measures_and_goes_on(local_ray: None, evaluate: Evaluate) -> None:
    outcome = evaluate()
    assert outcome.code == 0, outcome.stderr
    for line in ("## Temperature 0, batch 2", "| ngram | exact | 4 |", "left out: ngram with the static tree"):
        assert line in outcome.stdout
    results = Results.load(outcome.folder)
    ngram = figures(results.cells)[-1]
    gain = f"ngram is {ngram.gamma:.2f} times as fast as plain decoding, with {ngram.rate:,.0f} tokens/s"
    assert f"tiny, temperature 0, batch 2: {gain}\n" in outcome.stdout
    assert [(cell.batch, cell.arm.method) for cell in results.cells] == [
        (batch, method) for batch in (1, 2) for method in ("plain decoding", "ngram")
    ]
    assert all(cell.differing_tokens == 0 for cell in results.cells)
    assert results.questions["tiny"]["prompts"] == 3
    assert "drafter evaluate --output" in results.environment["command"]
    names = {path.name for path in outcome.folder.iterdir()}
    assert {"results.json", "table.md"} <= names
    # As after a job that was stopped: only what is missing is measured.
    last = [results.cells.pop() for _ in range(2)]
    results.save(outcome.folder)
    outcome = evaluate()
    assert outcome.code == 0, outcome.stderr
    again = Results.load(outcome.folder)
    assert again.cells[:2] == results.cells
    assert [cell.tokens for cell in reversed(again.cells[2:])] == [cell.tokens for cell in last]
    # Nothing of another measurement is put beside it.
    outcome = evaluate("--max_new_tokens", 5)
    assert outcome.code == 2
    assert "holds another evaluation" in outcome.error


def test_only_cells_of_the_same_files_are_put_beside_each_other(
    local_ray: None, evaluate: Evaluate, model: Path, tmp_path: Path
) -> None:
    here = tmp_path / "model"
    shutil.copytree(model, here)
    settings = ("--model", here, "--batch", "1", "--tree", "exact", "--drafter", f"ngram+model:{tmp_path / 'small'}")
    shutil.copytree(model, tmp_path / "small")
    assert evaluate(*settings).code == 0
    for folder in (here, tmp_path / "small"):
        template = folder / "chat_template.jinja"
        before = template.read_text()
        template.write_text(before.replace("<|assistant|>", "<|user|>"))
        outcome = evaluate(*settings)
        assert (outcome.code, "holds another evaluation" in outcome.error) == (2, True), folder
        template.write_text(before)
    assert evaluate(*settings).code == 0


def test_each_category_is_measured_by_itself_with_forced_acceptance(local_ray: None, evaluate: Evaluate) -> None:
    outcome = evaluate("--by_category", "true", "--batch", "1", "--acceptance", "synthetic:1.5", "--tree", "exact")
    assert outcome.code == 0, outcome.stderr
    results = Results.load(outcome.folder)
    assert list(results.questions) == ["tiny: math", "tiny"]
    assert {one["file"] for one in results.questions.values()} == {str(outcome.folder.parent / "questions.jsonl")}
    assert {cell.questions for cell in results.cells} == {"tiny: math", "tiny"}
    assert all(cell.differing_tokens == 0 for cell in results.cells)
    assert "FORCED" in outcome.stdout


def test_what_the_worker_finds_wrong_is_said_in_one_line(local_ray: None, evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    outcome = evaluate("--drafter", tmp_path / "head")
    assert outcome.code == 2
    assert outcome.error.startswith("error: draft head")
    assert "has no config.json" in outcome.error
    assert not (outcome.folder / "results.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--input", "{tiny: nowhere.jsonl}"), "question file nowhere.jsonl cannot be read"),
        (("--input", "nowhere.jsonl"), "question file nowhere.jsonl cannot be read"),
        (("--input", "{}"), "input must name at least one file"),
        (("--num_draft_tokens", "0"), "num_draft_tokens must be at least 1, not 0"),
        (("--num_draft_tokens", "many"), "num_draft_tokens must be"),
        (("--batch", "[2, 2]"), "batch must be at least one value, none of them twice"),
        (("--tree", "round"), "tree must be"),
        (("--temperature", "-1"), "temperature must be finite and at least 0"),
        (("--drafter", "none"), "none is no drafter"),
        (("--samples", "2"), "at temperature 0 all answers to a question are the same"),
        (("--questions_per_file", "0"), "questions_per_file must be at least 1"),
        (("--acceptance", "2.5"), "acceptance must be null, or tokens a step as synthetic:2.5, not '2.5'"),
        (("--output", "s3://bucket/gain"), "output s3://bucket/gain is an address: give a folder of this machine"),
        (("--colour", "red"), "colour"),
    ],
)
def test_mistakes_are_said_in_one_line(evaluate: Evaluate, settings: tuple[str, ...], message: str) -> None:
    outcome = evaluate(*settings)
    assert outcome.code == 2
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.error


def test_a_damaged_output_is_left_alone(evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("{")
    outcome = evaluate()
    assert (outcome.code, "damaged results.json" in outcome.error) == (2, True)
    assert (tmp_path / "out" / "results.json").read_text() == "{"


def test_an_output_of_others_is_left_alone(evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.md").write_text("mine")
    outcome = evaluate()
    assert (outcome.code, "is not empty and has no results.json" in outcome.error) == (2, True)
    assert (tmp_path / "out" / "table.md").read_text() == "mine"


def test_one_value_or_a_list() -> None:
    given = ["--input", "i", "--output", "o", "--drafter", "a", "--num_draft_tokens", "[16, auto]", "--batch", "4"]
    plan = parse_config(given).plan()
    assert (plan.drafters, plan.num_draft_tokens, plan.batches) == (("a",), (16, "auto"), (4,))
    with pytest.raises(InputError, match="output is empty"):
        EvaluateConfig("i", " ")


def test_by_default_it_tells_what_a_job_would_gain_on_a_file() -> None:
    config = EvaluateConfig("data/my prompts.jsonl", "o", model="other")
    assert config.files == {"my prompts": "data/my prompts.jsonl"}
    plan = config.plan()
    assert (plan.drafters, plan.trees, plan.num_draft_tokens) == (("auto",), ("exact",), ("auto",))
    assert [config.plan(questions).batches for questions in (1, 5, 16, 1000)] == [(1,), (1, 5), (1, 16), (1, 16)]


@pytest.mark.parametrize("file", ["examples/evaluate.yaml", "benchmarks/memory.yaml", "benchmarks/samples.yaml"])
def test_the_committed_configurations_are_valid(file: str) -> None:
    config = parse_config(["--config", str(ROOT / file)])
    assert config.output == yaml.safe_load((ROOT / file).read_text())["output"]
    assert all((ROOT / questions).is_file() for questions in config.files.values())
