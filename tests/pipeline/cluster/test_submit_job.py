"""Jobs submitted to real clusters of several nodes, which grow and lose nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from ray.exceptions import AuthenticationError
from ray.runtime_env import RuntimeEnv

from drafter.source_commit import ROOT, for_a_copy
from examples.local_cluster import LocalCluster, NodeType
from jobs.submit import main
from pipeline.cluster.submit_job import SubmitConfig
from pipeline.errors import InputError
from tests.pipeline.conftest import read_rows, write_jsonl
from tests.support.prepared_workers import prepared_workers
from tests.support.waiting import PATIENCE, wait_until

ROWS = 768
"""So many that the first node is not done with them before the second one is there."""
MOST_NODES = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head without work, and an autoscaler for up to two GPU nodes."""
    growing = LocalCluster(growing={"gpu": NodeType(cpus=2, gpus=1, most=MOST_NODES)}, idle_seconds=3)
    growing.environment["RAY_DATA_MIN_GAP_BETWEEN_AUTOSCALING_REQUESTS"] = "1"  # seconds, not 10: these start quickly
    growing.environment["RAY_health_check_period_ms"] = "500"  # not 3,000, five of which a lost node is waited for
    with prepared_workers() as workers:
        growing.environment |= workers.environment
        with growing:
            yield growing


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    """A working directory with an input and a job's configuration."""
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"how many apples {n}"} for n in range(ROWS)])
    settings = {
        "input": "in.jsonl",
        "output": str(tmp_path / "out"),
        "model": str(model),
        "drafter": "ngram",
        "sampling": {"max_new_tokens": 60, "ignore_eos": True},
        "engine": {"max_num_seqs": 2, "num_draft_tokens": 2},
        "writing": {"rows_per_file": 8},
        "resources": {"max_actors": 2 * MOST_NODES},  # half of which never come
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def submit(
    cluster: LocalCluster, folder: Path, *command: str, submissions: int = 3, name: str | None = None
) -> subprocess.Popen[str]:
    arguments = ["--working_dir", str(folder), "--submissions", str(submissions)]
    arguments += [] if name is None else ["--name", name]
    arguments += ["--", "python", *command]
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.submit", *arguments],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_nodes_come_with_the_work_and_go_with_it(cluster: LocalCluster, job: Path) -> None:
    """All engines are asked for, and half of their nodes come, one of which is lost; the nodes are given back."""
    assert cluster.nodes() == []
    most = 0

    def grown() -> bool:
        nonlocal most
        most = max(most, len(cluster.nodes()))
        assert submitted.poll() is None, "\n".join(submitted.communicate())
        return most == MOST_NODES and any((job / "out" / "data").iterdir())

    submitted = submit(cluster, job, "-m", "jobs.generate", "--config", "job.yaml")
    try:
        wait_until(grown, "all nodes are there, and some rows", pause=0.2)
        os.kill(cluster.nodes()[0], signal.SIGKILL)
        printed, told = submitted.communicate(timeout=PATIENCE)
    finally:
        submitted.kill()
    assert submitted.returncode == 0, told
    assert f"{ROWS} finished, 0 failed" in printed
    rows = [row["request_id"] for path in (job / "out" / "data").iterdir() for row in read_rows(path)]
    assert Counter(rows) == Counter(f"in.jsonl:{n + 1}" for n in range(ROWS))
    wait_until(lambda: not cluster.nodes(), "the nodes are given back", pause=0.2)


@pytest.mark.slow
def test_what_is_submitted_again_and_how_often(cluster: LocalCluster, tmp_path: Path) -> None:
    fails_once = (
        "import pathlib, sys; mark = pathlib.Path(sys.argv[1]); again = mark.exists(); mark.touch();"
        "print('now', again); sys.exit(not again)"
    )
    started = {
        "a mistake": submit(cluster, tmp_path, "-c", "import sys; sys.exit(2)"),
        "it fails once": submit(cluster, tmp_path, "-c", fails_once, str(tmp_path / "was here")),
        "it fails always": submit(cluster, tmp_path, "-c", "import sys; sys.exit(3)", submissions=1),
    }
    printed = {name: one.communicate(timeout=PATIENCE) for name, one in started.items()}
    assert {name: one.returncode for name, one in started.items()} == {
        "a mistake": 2,
        "it fails once": 0,
        "it fails always": 1,
    }, printed
    submissions = {name: told.count("submitted as") for name, (_, told) in printed.items()}
    assert submissions == {"a mistake": 1, "it fails once": 2, "it fails always": 1}
    assert printed["it fails once"][0].count("now True") == 1  # a log is shown once
    assert "1 submissions did not finish it" in printed["it fails always"][1]


@pytest.mark.slow
def test_a_job_under_way_is_followed_by_its_name(cluster: LocalCluster, tmp_path: Path) -> None:
    """Who submitted it was killed: the same command follows it, another one is refused, a later one is a new one."""
    waits = (
        "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1]); (folder / 'begun').open('a').write('x')\n"
        "while not (folder / 'go').exists(): time.sleep(0.1)\n"
        "print('done waiting')"
    )

    def named(*command: str) -> subprocess.Popen[str]:
        return submit(cluster, tmp_path, "-c", *command, name="waiting")

    killed = named(waits, str(tmp_path))
    wait_until(lambda: (tmp_path / "begun").exists(), "the job runs")
    killed.kill()
    killed.communicate()
    refused = named("pass")
    assert "waiting-1 is under way with another command" in refused.communicate(timeout=PATIENCE)[1]
    assert refused.returncode == 2
    again = named(waits, str(tmp_path))
    assert again.stderr is not None
    assert again.stderr.readline().startswith("still under way as waiting-1 ")
    (tmp_path / "go").touch()
    printed, told = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, told
    assert "done waiting" in printed
    assert (tmp_path / "begun").read_text() == "x"
    later = named(waits, str(tmp_path))
    assert "submitted as waiting-2 " in later.communicate(timeout=PATIENCE)[1]
    assert later.returncode == 0


def test_without_a_cluster_it_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # which is put back
    assert main(["--address", "http://127.0.0.1:9", "--working_dir", str(tmp_path), "--", "python"]) == 1
    told = "error: no cluster takes jobs at http://127.0.0.1:9: start one here by `ray start --head`, or give"
    assert capsys.readouterr().err.startswith(told)


def test_the_ray_of_a_job_on_this_machine_takes_no_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ray finds it by itself, and it asks for a token that nobody else has."""
    told = AuthenticationError("a token is missing")
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Mock(side_effect=told))
    assert main(["--working_dir", str(tmp_path), "--", "python"]) == 1
    assert "error: no cluster takes jobs at " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no job: give its command after --, such as `-- drafter generate"),
        (["--submissions", "0", "--", "python"], "submissions must be at least 1, not 0"),
        (["--name", "two words", "--", "python"], "name must be one word of letters, digits, dots and hyphens"),
        (["--working_dir", "nowhere", "--", "python"], "working_dir nowhere is not a folder"),
        (["--runtime_env", "nowhere.yaml", "--", "python"], "runtime_env nowhere.yaml cannot be read"),
    ],
)
def test_mistakes_of_the_submission_itself(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_copy_of_this_code_is_told_its_commit(tmp_path: Path) -> None:
    more = tmp_path / "environment.yaml"
    more.write_text("env_vars: {MINE: yes please}")
    own = SubmitConfig(working_dir=str(ROOT), runtime_env=str(more)).environment()["env_vars"]
    assert own == {**for_a_copy(), "MINE": "yes please"}
    assert "env_vars" not in SubmitConfig(working_dir=str(tmp_path)).environment()


def test_variables_that_are_none_are_refused(tmp_path: Path) -> None:
    more = tmp_path / "environment.yaml"
    more.write_text("env_vars: [MINE]")
    with pytest.raises(InputError, match=r"environment.yaml is not a mapping such as `env_vars"):
        SubmitConfig(runtime_env=str(more)).environment()


@pytest.mark.parametrize(("given", "said"), [("OMP_NUM_THREADS: 4", "OMP_NUM_THREADS: 4"), ("4: a", "4: 'a'")])
def test_variables_that_are_no_texts_are_refused(given: str, said: str, tmp_path: Path) -> None:
    more = tmp_path / "environment.yaml"
    more.write_text(f"env_vars: {{{given}}}")
    with pytest.raises(InputError, match=rf"environment.yaml: env_vars has {said}, .* texts: put quotes"):
        SubmitConfig(runtime_env=str(more)).environment()


def test_what_ray_refuses_in_an_environment_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Client:
        def submit_job(self, runtime_env: dict[str, Any], **job: Any) -> str:
            return str(RuntimeEnv(**runtime_env))

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: Client())
    more = tmp_path / "environment.yaml"
    more.write_text("pip: 3")
    assert main(["--working_dir", str(tmp_path), "--runtime_env", str(more), "--", "python"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the job cannot be submitted: runtime_env['pip'] must be of type")
    assert said.count("\n") == 1
