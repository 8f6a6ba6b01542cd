"""The chain of jobs: what is submitted, in which order, what is passed over, and what an interruption leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.local_cluster import end_cluster
from pipeline.cluster.submit_job import SubmitConfig
from pipeline.errors import InputError, JobError
from recipes.paper import __main__ as command
from recipes.paper.__main__ import main
from recipes.paper.chain import alone, entrypoint, needs_cluster, run_chain, submission_name
from recipes.paper.paper_config import HERE, PaperConfig, parse_config
from recipes.paper.stage_jobs import Places, Stage, stages
from tests.support.paths import ROOT
from tests.support.prepared_workers import PreparedWorkers, prepared_workers
from tests.support.waiting import PATIENCE, wait_until

GSM8K = "data/gsm8k/test.jsonl"
CONFIGURATIONS = ["tiny", "smollm2", "vicuna-7b", "vicuna-13b", "vicuna-33b"]


def configuration(name: str, folder: Path, *settings: str) -> PaperConfig:
    return parse_config(
        ["--config", str(HERE / f"{name}.yaml"), "--output", str(folder), *settings], "recipes.paper", ""
    )


class Cluster:
    """Stands for a cluster: notes what is submitted, and answers with exit codes."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.asked: list[str] = []

    def submit(self, stage: Stage) -> int:
        assert stage.file is None or stage.file.exists()
        self.asked.append(stage.name)
        return self.codes.get(stage.name, 0)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_a_chain_whose_jobs_take_their_settings(name: str, tmp_path: Path) -> None:
    config = configuration(name, tmp_path)
    found = stages(config)
    plain = [head.replace("hydra++", "hydra-plus-plus") for head in config.heads]
    trained = [f"train-{head}" for head in plain]
    assert [one.name for one in found] == ["base", "openings", "questions", "prompts", "answers", *trained, "evaluate"]
    assert {"medusa", "hydra", "hydra++", "ctc", "eagle3", "specformer"} < set(config.heads)
    drafters = found[-1].settings["drafter"]
    assert drafters == [str(tmp_path / "heads" / head / "head") for head in plain]
    # What the chain's own jobs read is what the run was given.
    values = yaml.safe_load(yaml.safe_dump({**dataclasses.asdict(config), "output": str(tmp_path)}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert parse_config(["--config", str(tmp_path / "run.yaml")], "recipes.paper", "") == config


def test_finished_stages_are_passed_over_and_changed_ones_are_asked_again(tmp_path: Path) -> None:
    places, jobs = Places(tmp_path), stages(configuration("tiny", tmp_path))
    first, second = Cluster({"train-ctc": 1}), Cluster()
    with pytest.raises(JobError, match="stage train-ctc failed"):
        run_chain(jobs, places, first.submit)
    assert first.asked[-1] == "train-ctc"
    assert "train-eagle3" not in first.asked
    assert needs_cluster(jobs, places)
    run_chain(jobs, places, second.submit)
    assert not needs_cluster(jobs, places)
    assert second.asked == [one.name for one in jobs][len(first.asked) - 1 :]
    third, changed = Cluster(), stages(configuration("tiny", tmp_path, "--training.log_every", "3"))
    run_chain(changed, places, third.submit)
    # What reads the heads is asked, too: they may have been made anew.
    assert third.asked == [one.name for one in jobs if one.name.startswith(("train-", "evaluate"))]
    (tmp_path / "jobs" / "done.json").write_text('{"base": "12')
    fourth = Cluster()
    run_chain(changed, places, fourth.submit)
    assert fourth.asked == [one.name for one in jobs]


def test_a_stage_follows_those_whose_output_it_reads(tmp_path: Path) -> None:
    def asked(*settings: str) -> list[str]:
        changed = stages(configuration("tiny", tmp_path, *settings))
        assert changed[-1].text == jobs[-1].text
        return [one.name for one, other in zip(jobs, changed, strict=True) if one.digest != other.digest]

    jobs = stages(configuration("tiny", tmp_path))
    names = [one.name for one in jobs]
    assert asked() == []
    assert asked("--prompts.written", "9") == names[1:]
    assert asked("--answers.sampling", "{max_new_tokens: 23}") == names[names.index("answers") :]
    # Heads do not read each other.
    assert asked("--heads.exit", "{layers: 1}") == ["train-exit", "evaluate"]


@pytest.mark.parametrize(("code", "error"), [(2, InputError), (130, KeyboardInterrupt), (1, JobError)])
def test_a_stage_that_does_not_succeed_ends_the_chain(code: int, error: type[BaseException], tmp_path: Path) -> None:
    cluster = Cluster({"prompts": code})
    with pytest.raises(error):
        run_chain(stages(configuration("tiny", tmp_path)), Places(tmp_path), cluster.submit)
    assert cluster.asked[-1] == "prompts"
    assert "prompts" not in json.loads((tmp_path / "jobs" / "done.json").read_text())


def test_submissions_of_an_output_have_names_of_their_own(tmp_path: Path) -> None:
    jobs = stages(configuration("tiny", tmp_path))
    places = Places(tmp_path / "a"), Places(tmp_path / "b")
    names = [submission_name(stage, one) for one in places for stage in jobs]
    assert len(set(names)) == 2 * len(jobs)
    assert names == [submission_name(stage, one) for one in places for stage in jobs]
    assert all(SubmitConfig(name=name) for name in names)  # names that a job may have


def test_a_job_under_way_with_earlier_settings_is_neither_followed_nor_joined(tmp_path: Path) -> None:
    """It has the same name and another command, which `jobs.submit` refuses."""
    places, jobs = Places(tmp_path), stages(configuration("tiny", tmp_path))
    changed = stages(configuration("tiny", tmp_path, "--training.log_every", "3"))
    differ = set()
    for before, after in zip(jobs, changed, strict=True):
        assert submission_name(before, places) == submission_name(after, places)
        if entrypoint(before) != entrypoint(after):
            differ.add(before.name)
    assert differ == {one.name for one in jobs if one.name.startswith(("train-", "evaluate"))}
    # A shell that runs it runs the stage's command.
    echoed = subprocess.check_output(entrypoint(dataclasses.replace(jobs[0], command=("echo", "base"))), text=True)
    assert echoed == "base\n"


def test_one_run_works_on_an_output_at_a_time(tmp_path: Path) -> None:
    with alone(Places(tmp_path)), pytest.raises(InputError, match="another run works on"), alone(Places(tmp_path)):
        pass
    with alone(Places(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "s3://bucket/out"}, "output s3://bucket/out is a URI: give a folder that all machines"),
        ({"heads": {}}, "heads names no head"),
        ({"heads": {"nobody": {}}}, "heads names 'nobody': recipes/paper/heads.yaml has medusa, hydra"),
        ({"heads": {"medusa": {"frames": 3}}}, "heads: draft head 'medusa': unknown configuration key 'frames'"),
        ({"training": {"steps": 3}}, "stage train-medusa: unknown setting steps: did you mean training.steps?"),
        ({"training": {"model": "other"}}, "settings of drafter train cannot have 'model': the recipe sets it"),
        ({"evaluation": {"input": GSM8K, "batch": 0}}, "batch must be at least 1, not 0"),
        ({"prompts": {"written": 0, "files": []}}, "there are no prompts: set prompts.written"),
        ({"evaluation": {"input": {"mt-bench": "nowhere.jsonl"}}}, "nowhere.jsonl cannot be read"),
        (
            {"evaluation": {"input": GSM8K, "questions_per_file": 3, "batch": [1, 16]}},
            "prompts do not fill a batch of 16",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load((HERE / "tiny.yaml").read_text()) | {"output": str(tmp_path / "out")} | change
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert main(["run", "--config", str(tmp_path / "run.yaml")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--training.training", "{stepps: 3}"), "stage train-medusa: "),
        (("--evaluation.batch", "0"), "batch must be at least 1, not 0"),
    ],
)
def test_what_could_not_be_run_is_not_estimated(
    settings: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config", str(HERE / "vicuna-7b.yaml"), "--output", str(tmp_path), *settings]
    assert main(["estimate", *given]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed


def test_a_folder_in_the_repository_is_a_base_wherever_the_jobs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in a copy of this folder, which lacks what .gitignore names."""
    monkeypatch.setattr(command, "needs_cluster", lambda stages, places: False)
    monkeypatch.setattr(command, "table", lambda config: None)

    def handed_on(source: str) -> str:
        values = yaml.safe_load((HERE / "tiny.yaml").read_text())
        command.run(parse_config(["--config", str(HERE / "tiny.yaml"), "--output", str(tmp_path),
                                  "--base", json.dumps({**values["base"], "source": source})], "", ""))  # fmt: skip
        return str(yaml.safe_load((tmp_path / "jobs" / "run.yaml").read_text())["base"]["source"])

    monkeypatch.chdir(tmp_path)
    assert handed_on("recipes/paper") == str(HERE)
    assert handed_on("random") == "random"
    assert handed_on("lmsys/vicuna-7b-v1.3") == "lmsys/vicuna-7b-v1.3"


def test_commands_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["walk"]) == 2
    assert "there is no command 'walk': give one of run, estimate, table" in capsys.readouterr().err
    assert main(["table", "--config", str(HERE / "tiny.yaml"), "--output", str(tmp_path)]) == 2
    assert "results.json: run the chain first" in capsys.readouterr().err
    assert main(["estimate", "--config", str(HERE / "tiny.yaml"), "--output", str(tmp_path)]) == 2
    assert "set hardware, as vicuna-7b.yaml does" in capsys.readouterr().err


_JOBS = 3
"""Jobs that one run of the test waits for at most, one after another."""


@dataclass
class Running:
    """The command `run` in a process, with all that it starts, and what they print."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, folder: Path, workers: PreparedWorkers, *settings: str) -> Running:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= workers.environment
        command = [sys.executable, "-m", "recipes.paper", "run", "--config", str(HERE / "tiny.yaml")]
        command += ["--output", str(folder), *settings]
        log = folder.with_name(f"{folder.name}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return cls(process, log)

    def kill_when(self, condition: Callable[[], bool], what: str) -> None:
        """Kill it with all that it has started, at once, as when a machine loses its power."""

        def reached() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return condition()

        try:
            wait_until(reached, what)
        finally:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self) -> str:
        """Wait for its end; return what it printed."""
        try:
            assert self.process.wait(_JOBS * PATIENCE) == 0, self.log.read_text()
        except subprocess.TimeoutExpired:
            self.process.terminate()  # it ends its cluster, too
            self.process.wait()
            raise
        return self.log.read_text()


def _steps(saved: dict[str, Any]) -> int:
    return int(saved["steps"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * _JOBS * PATIENCE)
def test_the_table_of_a_tiny_vicuna_by_one_command_killed_in_the_middle(tmp_path: Path) -> None:
    """A real cluster with a logical GPU, from random weights to the table; killed inside a training, then run again."""
    out = tmp_path / "out"
    training = {
        "training": {"steps": 40, "texts_per_step": 4, "anchors_per_text": 8, "evaluate_every": 40},
        "texts": {"max_length": 256},
        "workers": {"gpus": 1},
        "log_every": 1,
        "checkpoint_every": 1,  # so that there is one to go on from, whenever it is killed
    }
    settings = ("--heads", "{ctc: {}}", "--training", json.dumps(training))
    checkpoints = out / "heads" / "ctc" / "_checkpoints"
    with prepared_workers() as workers:
        first = Running.start(out, workers, *settings)
        try:
            first.kill_when(lambda: len(list(checkpoints.glob("step-*"))) > 1, "training has begun")
        finally:
            if (out / "cluster").exists():  # or it failed before it started one, and its log says why
                end_cluster((out / "cluster").read_text())  # what was in sessions of its own
        # A checkpoint is whole when its progress file is there.
        saved = max((json.loads(file.read_text()) for file in checkpoints.glob("step-*/progress.json")), key=_steps)
        assert 1 <= saved["steps"] < 40
        before = (out / "answers" / "run.json").read_bytes()
        printed = Running.start(out, workers, *settings).finish()
        again = Running.start(out, workers, *settings).finish()
    assert [line.split(": ")[1] for line in printed.splitlines() if line.startswith("--- ")] == [
        "train-ctc",
        "evaluate",
    ]
    assert (out / "answers" / "run.json").read_bytes() == before
    assert not (out / "cluster").exists()
    # What was logged before the checkpoint was not done again: its speed would have been another one.
    records = [json.loads(line) for line in (out / "heads" / "ctc" / "metrics.jsonl").read_text().splitlines()]
    assert records[: len(saved["records"])] == saved["records"]
    assert "tokens_per_second" in saved["records"][0]
    assert records[-1]["step"] == 40
    table = (out / "table.md").read_text()
    for method in ("vanilla", "ctc"):
        assert f"| {method} |" in table
    assert table in printed

    assert not [line for line in again.splitlines() if line.startswith("--- ")]
    assert "a cluster is up" not in again
    assert table in again
