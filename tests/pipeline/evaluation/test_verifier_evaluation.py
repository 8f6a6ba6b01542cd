from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drafter.acceptance.contract import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError
from drafter.evaluation.questions import Question, read_questions
from drafter.evaluation.verifiers import VerifierFigures
from drafter.requests import Request
from drafter.statistics import DecodeCounts
from jobs.evaluate import main
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.errors import InputError
from pipeline.evaluation import evaluate_job
from pipeline.evaluation.config import EvaluateConfig, named_verifier, parse_config
from pipeline.evaluation.evaluate_job import evaluate_verifiers
from tests.pipeline.conftest import JobRun, write_jsonl

Evaluate = Callable[..., JobRun]


@pytest.fixture
def evaluate(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the job in this process: `evaluate("--rounds", 2)`."""
    rows = [{"question": f"how many apples {n} how many apples {n}", "answer": f"#### {n}"} for n in range(5)]
    questions = write_jsonl(tmp_path / "questions.jsonl", rows)
    scorer = tmp_path / "score.py"
    scorer.write_text("def worth(row): return 1 + (len(row['token_ids']) + int(row['answer'][5:])) % 2\n")

    def job(*settings: object) -> JobRun:
        arguments = ["--output", tmp_path / "out", "--model", model, "--input", f"{{tiny: {questions}}}"]
        arguments += ["--drafter", "ngram", "--batch", 4, "--num_draft_tokens", 8, "--max_new_tokens", 40]
        arguments += ["--scorer", f"{scorer}:worth"]
        arguments += ["--verifier", "['typical:delta=0.9', 'typical:delta=0.01', 'fly:window=1,theta=0']"]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return JobRun(code, printed.out, printed.err, tmp_path / "out")

    return job


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_verifiers_are_measured_beside_exact_decoding(evaluate: Evaluate) -> None:
    outcome = evaluate("--temperature", "[0.0, 0.9]")
    assert outcome.code == 0, outcome.stderr
    results = json.loads((outcome.folder / "verifiers.json").read_text())
    greedy, drawn = results["blocks"]
    assert [one["verifier"] for one in greedy["verifiers"]] == ["exact", "typical", "typical", "fly"]
    assert [one["verifier"] for one in drawn["verifiers"]] == ["exact", "typical", "typical"]
    assert "the verifier fly decodes greedily" in drawn["left_out"][0]
    exact, *typical, fly = greedy["verifiers"]
    assert all(one["lenient_tokens"] == 0 and one["kept"] == 1 for one in [exact, *typical])  # greedy rows are exact
    assert fly["lenient_tokens"] > 0
    assert fly["beta"] > exact["beta"] > 1
    lenient = [one["lenient_tokens"] for one in drawn["verifiers"]]
    assert lenient[0] == 0 < lenient[-1]
    assert results["environment"]["command"].startswith("drafter evaluate")
    again = evaluate("--temperature", "[0.0, 0.9]")
    assert (again.code, "holds an evaluation of verifiers" in again.stderr) == (2, True)


class Measured:
    """Evaluates two blocks without a cluster: the actor's place is taken by literal runs.

    Args:
        model: The base.
        folder: Of the questions and of the output.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.output = folder / "out"
        self.output.mkdir()
        file = write_jsonl(folder / "questions.jsonl", [{"question": "how many apples", "answer": "4"}])
        self._questions: dict[str, list[Question]] = {"tiny": read_questions(str(file), None)}
        self._model = str(model)
        self._requests: Sequence[Request] = ()

    @contextmanager
    def measuring(self, resources: ActorResources, *asked: Any, **_: object) -> Iterator[Callable[..., Any]]:
        """Stand in for `measuring.measuring`."""
        yield lambda method, *given: getattr(self, f"_{method}")(*given)

    def _load(self, command: str) -> dict[str, Any]:
        return {"command": command}

    def _begin(self, drafter: str, engine: object, requests: Sequence[Request], rounds: int) -> None:
        self._requests = requests

    def _run(self, settings: VerifierSettings) -> VerifierFigures:
        """Answers are right from δ = 0.2 on, and β is 3 for exact decoding and larger the smaller δ is."""
        delta = settings.settings.get("delta", 1.0)
        counts = DecodeCounts(num_output_tokens=int(1e4 * (4 - delta)), num_decode_steps=10_000)
        (_,) = self._requests
        return VerifierFigures(settings, [[4]], ["4" if delta >= 0.2 else "5"], 0, counts, 2.0)

    def run(self, **settings: Any) -> None:
        """Evaluate."""
        config = EvaluateConfig(
            "questions.jsonl",
            str(self.output),
            self._model,
            drafter="ngram",
            temperature=[0.0, 0.5],
            num_draft_tokens=8,
            batch=1,
            scorer="number",
            target="answer",
            **{"verifier": "typical:delta=0.3", **settings},
        )
        evaluate_verifiers(config, self._questions, "command", self.output, ActorResources(1, 0, 1, None))

    @property
    def results(self) -> dict[str, Any]:
        """What is written."""
        values: dict[str, Any] = json.loads((self.output / "verifiers.json").read_text())
        return values


@pytest.fixture
def evaluation(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured(model, tmp_path)
    monkeypatch.setattr(evaluate_job, "measuring", found.measuring)
    return found


def test_all_settings_of_a_verifier_are_measured(evaluation: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation.run(verifier=["typical", "typical:delta=0.3", "typical:delta=0.09"])
    for block in evaluation.results["blocks"]:
        deltas = [one["settings"].get("delta") for one in block["verifiers"]]
        assert deltas == [None, None, 0.3, 0.09]
        assert [one["kept"] for one in block["verifiers"][2:]] == [1, 0]
    assert "typical, delta 0.09: β 3.91, keeps 0.0%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fly", VerifierSettings("fly")),
        ("fly:theta=0.5,window=3", VerifierSettings("fly", {"theta": 0.5, "window": 3})),
        ("pad:classifier=/a/b,sigma=1", VerifierSettings("pad", {"classifier": "/a/b", "sigma": 1.0})),
    ],
)
def test_a_verifier_by_name(text: str, settings: VerifierSettings) -> None:
    assert named_verifier(text) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "no lenient verifier 'exact': there are fly, pad, typical"),
        ("fly:depth=3", "the verifier fly has no depth"),
        ("fly:theta=low", "'theta' cannot be 'low'"),
    ],
)
def test_what_is_no_verifier_is_refused(text: str, message: str) -> None:
    with pytest.raises((InputError, LoadError), match=message):
        make_verifier(EvaluateConfig("in", "out", verifier=text, scorer="json").lenient_verifiers()[0])


def test_bad_settings_of_verifiers(tmp_path: Path) -> None:
    for arguments, message in (
        (["--scorer", "json"], "scorer is of verifiers: name one as verifier"),
        (["--verifier", "fly"], "verifiers are measured by what answers are worth: name a scorer"),
    ):
        with pytest.raises(InputError, match=message):
            parse_config(["--input", "in", "--output", str(tmp_path), *arguments])
